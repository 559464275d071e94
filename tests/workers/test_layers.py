"""PackedLinear -> nn.Linear's numbers, and the same bits for a row whatever stands beside it."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from paceline.workers.layers import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(), reason="this build of torch has no oneDNN packed linears")

SHAPES = [(64, 96), (96, 64), (64, 211), (100, 33), (1024, 48), (1030, 40), (1536, 64), (2049, 17)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Both thread counts; the kernel splits its work differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def linear(num_in: int, num_out: int, *, bias: bool = False) -> nn.Linear:
    """A random layer."""
    torch.manual_seed(num_in * 10_000 + num_out)
    return nn.Linear(num_in, num_out, bias=bias).requires_grad_(False)


@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_equals_the_linear_it_replaces(
    num_in: int, num_out: int, bias: bool, threads: int
) -> None:
    """Within float32 rounding, for one row, a few, and leading dimensions."""
    plain = linear(num_in, num_out, bias=bias)
    packed = PackedLinear(plain)
    for shape in [(1, num_in), (2, num_in), (63, num_in), (1, 5, num_in), (num_in,)]:
        x = torch.randn(shape)
        exact = nn.functional.linear(
            x.double(), plain.weight.double(), None if plain.bias is None else plain.bias.double()
        )

        assert packed(x).shape == (*shape[:-1], num_out)
        assert float((packed(x) - exact).abs().max()) < 1e-5
        torch.testing.assert_close(packed(x), plain(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_the_bits_of_a_row_do_not_depend_on_the_batch(num_in: int, num_out: int, threads: int) -> None:
    """Sizes 1 to 63, the row first, last or in the middle: this is what makes a text independent of traffic."""
    packed = PackedLinear(linear(num_in, num_out, bias=True))
    x = torch.randn(63, num_in)
    whole = packed(x)
    different = []
    for size in range(1, 64):
        start = (size * 7) % (64 - size)
        if not torch.equal(packed(x[start : start + size]), whole[start : start + size]):
            different.append(size)

    assert not different, f"{num_in} -> {num_out} at {threads} threads: batch sizes {different} differ"


def test_the_single_row_of_a_wide_layer_needs_its_padding(threads: int) -> None:
    """Negative control: without the second row a lone wide row has other bits (if never, drop the padding)."""
    plain = linear(2049, 64)
    packed = PackedLinear(plain)
    x = torch.randn(32, 2049)
    whole = packed(x)
    raw = [
        torch.ops.mkldnn._linear_pointwise(x[i : i + 1], packed._packed, None, "none", [], "")
        for i in range(32)
    ]
    padded = [packed(x[i : i + 1]) for i in range(32)]

    assert torch.equal(torch.cat(padded), whole)
    if torch.equal(torch.cat(raw), whole):
        pytest.skip("this machine's oneDNN gives a lone row the same bits")


def test_every_linear_of_a_model_is_replaced() -> None:
    """Nested modules too, once each, and what is no linear stays."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 4), nn.ReLU()))
    x = torch.randn(3, 8)
    before = model(x)
    replaced = pack_linears(model)

    assert replaced == 2
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-5)
