"""Partial attention outputs and their log-sum-exps -> the rows' outputs.

    m = max_i l_i,  o = sum_i e^(l_i - m) o_i / sum_i e^(l_i - m)

in the order given. A sink is a key without a value: a partial result of zero with its logit as log-sum-exp.

Legend: T rows, H query heads, D head size of values, E partial results, M entries.
"""

from __future__ import annotations

from torch import Tensor

from paceline.kernels import attention_merge_reference as reference
from paceline.kernels.dispatch import Backend, backend_of


def attention_merge(
    partial_EHD: Tensor,
    lse_EH: Tensor,
    starts: Tensor,
    entries_M: Tensor,
    out_THD: Tensor,
    *,
    sinks_H: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Merge partial results entries[starts[t] : starts[t + 1]] into row t; rows without any are left as they are.

    Args:
        partial_EHD, lse_EH: float32; natural logarithms, -inf where a part saw no key. starts: int32 [T + 1].
        entries_M: int32. out_THD: any float dtype, written. sinks_H: float32 logits.
        backend: "triton" or "reference".
    """
    run = reference.attention_merge
    if backend_of(partial_EHD, backend) != "reference":
        from paceline.kernels import (
            attention_merge_triton as kernel,  # there is no Triton where there is no GPU
        )

        run = kernel.attention_merge
    run(partial_EHD, lse_EH, starts, entries_M, out_THD, sinks_H)
