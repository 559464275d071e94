"""KV rows -> codes and back: within their error, with bounded harm to attention, the same codes on every backend."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.kernels.kv_codec import CodecName, attention_bound, decode, encode, error_bound

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter rounds bfloat16 its own way
CODECS: tuple[CodecName, ...] = ("int8", "fp8")


def rows_of(seed: int, *shape: int) -> torch.Tensor:
    """Rows with a few channels that stand out, as keys have."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=draw)
    rows[..., :: max(1, shape[-1] // 4)] *= 12
    return rows.to(DEVICE)


def there_and_back(rows: torch.Tensor, codec: CodecName, backend: str | None = None) -> torch.Tensor:
    return decode(*encode(rows, codec, backend=backend), codec, rows.dtype, backend=backend)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 2, 3, 7, 16), (70, 33)])
def test_no_element_is_further_off_than_the_codec_says(codec: CodecName, shape: tuple[int, ...]) -> None:
    """Rows of very different sizes; zero is zero, the largest element is exact up to float rounding."""
    rows = rows_of(len(shape), *shape) * torch.logspace(-20, 20, shape[0], device=DEVICE).view(
        -1, *[1] * (len(shape) - 1)
    )
    rows[..., -1] = 0 if shape[-1] > 1 else rows[..., -1]
    found = there_and_back(rows, codec)

    assert bool(((found - rows).abs() <= error_bound(rows, codec)).all())
    assert bool((found[rows == 0] == 0).all())
    largest = rows.abs().amax(-1)
    torch.testing.assert_close(found.abs().amax(-1), largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", CODECS)
def test_the_bound_of_an_element_can_be_missed(codec: CodecName) -> None:
    """Negative control: with codes a tenth coarser some elements break the bound."""
    rows = rows_of(0, 50, 64)
    codes, scales = encode(rows * 1.1, codec)
    wrong = decode(codes, scales / 1.1 * 1.02, codec, rows.dtype)

    assert not bool(((wrong - rows).abs() <= error_bound(rows, codec)).all())


@pytest.mark.parametrize("codec", CODECS)
def test_attention_moves_no_further_than_its_bound(codec: CodecName) -> None:
    """300 random heads, outlier channels in the keys: weights and every channel of the output (serving.md's bound)."""
    closest = 0.0
    for trial in range(300):
        draw = torch.Generator().manual_seed(trial)
        num, dim = int(torch.randint(4, 300, (1,), generator=draw)), 64
        k = rows_of(trial, num, dim).cpu().double()
        v = torch.randn(num, dim, generator=draw).double()
        q = torch.randn(dim, generator=draw).double() * (0.2 + trial % 4)
        k_found, v_found = (there_and_back(x.float(), codec).double() for x in (k, v))
        scores, scores_found = k @ q / math.sqrt(dim), k_found @ q / math.sqrt(dim)
        p, p_found = scores.softmax(0), scores_found.softmax(0)
        errors = scores_found - scores
        moved = (p_found @ v_found - p @ v).abs()
        bound = attention_bound(errors, float((v_found - v).abs().max()), v)

        half = float(errors.max() - errors.min()) / 2
        assert float((p_found - p).abs().sum()) / 2 <= math.tanh(half / 2) + 1e-12
        assert bool((moved <= bound + 1e-12).all())
        # What can be said beforehand: an error of at most delta_c in channel c moves a score by |q| . delta / sqrt(d).
        before = (error_bound(k.float(), codec).double() @ q.abs()) / math.sqrt(dim)
        assert bool((errors.abs() <= before + 1e-12).all())
        closest = max(closest, float((moved / bound).max()))
    assert closest > 0.2, "the bound is so loose that nothing could break it"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_backends_give_the_same_codes(codec: CodecName, dtype: torch.dtype) -> None:
    """Bit for bit, ties, tiny, huge and unusable rows too; either decodes what the other encoded."""
    rows = rows_of(5, 70, 24)
    rows[3] = 0
    rows[4] = torch.arange(24) - 12.5  # ties in int8 and fp8
    rows[5] *= 1e-30
    rows[6] *= 1e30
    rows[7, 2], rows[8, 3], rows[9, 4] = torch.nan, torch.inf, -torch.inf
    rows = rows.to(dtype)
    plain, fast = (encode(rows, codec, backend=backend) for backend in ("reference", "triton"))

    assert torch.equal(plain[0], fast[0])
    torch.testing.assert_close(plain[1], fast[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        decode(*plain, codec, dtype, backend="triton"),
        decode(*fast, codec, dtype, backend="reference"),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_unusable_row_stays_unusable(codec: CodecName, backend: str) -> None:
    """NaN and infinity become NaN in all of their row and nowhere else."""
    rows = rows_of(1, 40, 8)
    rows[3, 1], rows[17, 0], rows[39, 7] = torch.nan, torch.inf, -torch.inf
    found = there_and_back(rows, codec, backend)

    is_bad = ~rows.isfinite().all(-1)
    assert bool(found[is_bad].isnan().all()) and bool(found[~is_bad].isfinite().all())


def test_the_codecs_rank_as_measured() -> None:
    """Relative error of keys with outlier channels: int8 of a token and head is near 0.017, fp8 near 0.020."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(512, 8, 128, generator=draw)
    for head in range(8):
        keys[:, head, torch.randperm(128, generator=draw)[:6]] *= 12
    off = {codec: float((there_and_back(keys, codec) - keys).norm() / keys.norm()) for codec in CODECS}

    assert 0.010 < off["int8"] < 0.025 and 0.015 < off["fp8"] < 0.030
