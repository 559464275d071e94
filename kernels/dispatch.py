"""A tensor -> which implementation of a kernel runs on it.

A kernel is `op.py` (what it promises), `op_reference.py` (plain torch), and for speed `op_jit.py` (numba, CPU) or
`op_triton.py` (CUDA). Only the dispatching function imports `op_triton`, when it runs it: Triton is not installed where
there is no GPU.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Backend = Literal["triton", "reference"]


def backend_of(tensor: Tensor, backend: Backend | None = None) -> Backend:
    """`backend` if somebody chose it; else Triton for what lies on a GPU. Its interpreter (TRITON_INTERPRET=1) takes any."""
    return backend or ("triton" if tensor.is_cuda else "reference")
