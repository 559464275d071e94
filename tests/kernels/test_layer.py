"""The compiled steps of a layer against plain tensor operations, and each row against itself in another batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.kernels.layer_jit import gate, rms_norm, rotate_and_store

NONE = np.empty(0, np.float32)


@pytest.mark.parametrize("size", [1, 7, 64, 513])
def test_rms_norm_is_the_plain_one_row_by_row(size: int) -> None:
    """Odd sizes; a row alone has the same bits; NaN stays in its row."""
    x, weight = torch.randn(5, size) * 3, torch.randn(size)
    x[3, 0] = torch.nan
    out, alone = torch.empty(5, size), torch.empty(1, size)
    rms_norm(x.numpy(), weight.numpy(), np.float32(1e-6), out.numpy())
    rms_norm(x[1:2].numpy(), weight.numpy(), np.float32(1e-6), alone.numpy())

    keep = [0, 1, 2, 4]
    torch.testing.assert_close(out[keep], F.rms_norm(x, (size,), weight, 1e-6)[keep], rtol=1e-5, atol=1e-6)
    assert torch.equal(alone[0], out[1])
    assert out[3].isnan().all()


@pytest.mark.parametrize("size", [1, 9, 832])
def test_gate_is_silu_times_up_for_all_sizes_of_its_input(size: int) -> None:
    """From far below underflow to far above overflow of exp; NaN and a row alone as above."""
    both = torch.randn(6, 2 * size) * torch.tensor([0.01, 1.0, 10.0, 80.0, 1e4, 1.0])[:, None]
    both[5, 0] = torch.nan
    out, alone = torch.empty(6, size), torch.empty(1, size)
    gate(both.numpy(), out.numpy())
    gate(both[2:3].numpy(), alone.numpy())

    expected = F.silu(both[:, :size].double()) * both[:, size:].double()
    torch.testing.assert_close(out[:5].double(), expected[:5], rtol=2e-6, atol=1e-27)
    assert torch.equal(alone[0], out[2])
    assert out[5, 0].isnan() and not out[5, 1:].isnan().any()


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 16), (3, 3, 6), (8, 1, 64)])
def test_rotation_stores_keys_and_values_at_their_slots(
    with_norms: bool, heads: int, groups: int, dim: int
) -> None:
    """Rotation as rotate_half has it, behind a norm of each head if there is one; nothing else is written."""
    num, num_slots, at = 5, 32, torch.tensor([3, 0, 9, 9, 31])
    slots = torch.tensor([30, 4, 5, 0, 17])
    qkv = torch.randn(num, (heads + 2 * groups) * dim)
    angles = torch.rand(num_slots, dim // 2).repeat(1, 2) * 6
    cos, sin = angles.cos(), angles.sin()
    signed = torch.cat([-sin[:, : dim // 2], sin[:, dim // 2 :]], 1)
    norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if with_norms else (None, None)
    k_pool, v_pool = torch.full((groups, num_slots, dim), 7.0), torch.full((groups, num_slots, dim), 7.0)
    q = torch.empty(num, heads, dim)
    rotate_and_store(
        qkv.numpy(),
        at.numpy(),
        slots.numpy(),
        cos.numpy(),
        signed.contiguous().numpy(),
        *(NONE if norm is None else norm.numpy() for norm in norms),
        np.float32(1e-6),
        heads,
        k_pool.numpy(),
        v_pool.numpy(),
        q.numpy(),
    )

    def rotated(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        x = x if norm is None else F.rms_norm(x, (dim,), norm, 1e-6)
        half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * cos[at][:, None] + half * sin[at][:, None]

    split = qkv.view(num, -1, dim)
    torch.testing.assert_close(q, rotated(split[:, :heads], norms[0]), rtol=1e-5, atol=1e-5)
    keys = rotated(split[:, heads : heads + groups], norms[1]).transpose(0, 1)
    torch.testing.assert_close(k_pool[:, slots], keys, rtol=1e-5, atol=1e-5)
    assert torch.equal(v_pool[:, slots], split[:, heads + groups :].transpose(0, 1))
    others = [slot for slot in range(num_slots) if slot not in slots.tolist()]
    assert (k_pool[:, others] == 7).all() and (v_pool[:, others] == 7).all()
