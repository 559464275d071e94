"""KVCache -> rows come back from where they were put, and a digest that nothing else shares."""

import msgspec
import pytest
import torch
from torch import Tensor

from paceline.cluster.types import KVReady
from paceline.workers.kv_cache import KVCache, digest

LAYERS, GROUPS, DIM, BLOCKS, BLOCK = 3, 2, 5, 11, 4
KEY = bytes(range(32))


@pytest.fixture
def cache() -> KVCache:
    """A small pool, filled so that every element is different."""
    made = KVCache(
        num_layers=LAYERS,
        num_kv_heads=GROUPS,
        head_dim=DIM,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        model_version="v",
    )
    for layer in range(LAYERS):
        slots = torch.arange(BLOCKS * BLOCK)
        shape = (2, BLOCKS * BLOCK, GROUPS, DIM)
        rows = torch.arange(layer * 10_000, layer * 10_000 + 2 * BLOCKS * BLOCK * GROUPS * DIM)
        made.scatter(layer, slots, rows.float().view(shape))
    return made


def everything(cache: KVCache) -> Tensor:
    """A copy of the whole pool, [layers, 2, slots, G, D]."""
    return torch.stack([cache.gather(layer, torch.arange(BLOCKS * BLOCK)) for layer in range(LAYERS)])


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (0, 12), (3, 5), (4, 8), (7, 12), (11, 12)])
def test_slots_follow_the_block_table(start: int, stop: int, cache: KVCache) -> None:
    """Position p stands in block table[p // size] at offset p % size."""
    table = [7, 0, 10]
    slots = cache.slots(table, start, stop)

    assert slots.dtype == torch.int64
    assert slots.tolist() == [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, stop)]


def test_written_rows_are_read_back_and_nothing_else_changes(cache: KVCache) -> None:
    """`write` touches its layer's K and V at its slots only."""
    before = everything(cache)
    slots = cache.slots([5, 2], 1, 7)
    k, v = torch.randn(6, GROUPS, DIM), torch.randn(6, GROUPS, DIM)
    cache.write(1, slots, k, v)
    after = everything(cache)
    changed = (before != after).flatten(3).any(-1)

    assert torch.equal(cache.keys(1)[:, slots], k.transpose(0, 1))
    assert torch.equal(cache.values(1)[:, slots], v.transpose(0, 1))
    assert torch.equal(cache.gather(1, slots), torch.stack([k, v]))
    assert not changed[[0, 2]].any()
    assert sorted(set(changed[1].nonzero()[:, 1].tolist())) == sorted(slots.tolist())


def test_scatter_undoes_gather_in_other_slots(cache: KVCache) -> None:
    """What a peer gathers from its blocks lands in ours unchanged."""
    source, destination = cache.slots([1, 9], 2, 8), cache.slots([3, 6], 0, 6)
    before = everything(cache)
    for layer in range(LAYERS):
        rows = cache.gather(layer, source)
        cache.scatter(layer, destination, rows)

        assert rows.is_contiguous()
        assert torch.equal(cache.gather(layer, destination), rows)
    untouched = [s for s in range(BLOCKS * BLOCK) if s not in destination.tolist()]
    assert torch.equal(everything(cache)[:, :, untouched], before[:, :, untouched])


def test_move_reads_all_sources_before_it_writes(cache: KVCache) -> None:
    """Overlapping source and destination slots: each row is the old one, in all layers, K and V."""
    before = everything(cache)
    source, destination = torch.tensor([8, 9, 10, 4]), torch.tensor([9, 10, 8, 5])
    cache.move(source, destination)
    after = everything(cache)
    rest = [s for s in range(BLOCKS * BLOCK) if s not in destination.tolist()]

    assert torch.equal(after[:, :, destination], before[:, :, source])
    assert torch.equal(after[:, :, rest], before[:, :, rest])


def test_gather_is_a_copy(cache: KVCache) -> None:
    """Rows on their way to a peer do not change when the pool does."""
    slots = cache.slots([2], 0, 4)
    rows = cache.gather(0, slots)
    kept = rows.clone()
    cache.write(0, slots, torch.zeros(4, GROUPS, DIM), torch.zeros(4, GROUPS, DIM))

    assert torch.equal(rows, kept)


def test_the_layout_says_what_both_ends_must_agree_on(cache: KVCache) -> None:
    """Layers, heads, size, type and version; and what a token costs."""
    layout = cache.layout

    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (LAYERS, GROUPS, DIM)
    assert (layout.dtype, layout.model_version) == ("float32", "v")
    assert KVCache.bytes_per_token(LAYERS, GROUPS, DIM) == 2 * LAYERS * GROUPS * DIM * 4


PLACE = KVReady("r", 1, "kv/1", 2, 1, 0, GROUPS, 3, 2)
"""One layer of two tokens, all heads."""


@pytest.fixture(params=["blake3", "gmac"])
def place(request: pytest.FixtureRequest) -> KVReady:
    """One layer of two tokens, all heads, digested either way."""
    return msgspec.structs.replace(PLACE, digest_by=request.param)


def test_a_digest_changes_with_every_bit(cache: KVCache, place: KVReady) -> None:
    """Each of the bits of a message, flipped alone, gives another digest."""
    rows = cache.pack(place, torch.arange(2))
    right = digest(KEY, place, rows)
    seen = {right}
    flat = rows.view(torch.uint8).view(-1)
    for byte in range(len(flat)):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            seen.add(digest(KEY, place, rows))
            flat[byte] ^= 1 << bit

    assert len(seen) == 1 + 8 * len(flat)
    assert digest(KEY, place, rows) == right


def test_a_digest_belongs_to_one_place(place: KVReady) -> None:
    """Intact bytes for another key, request, epoch, link, layer, head, range, shape, type or way are refused."""
    rows = torch.zeros(2, 3, GROUPS, 8)

    def moved(**changes: object) -> KVReady:
        return msgspec.structs.replace(place, **changes)

    places = [
        (KEY, PLACE, rows),
        (KEY, msgspec.structs.replace(PLACE, digest_by="gmac"), rows),
        (bytes(32), place, rows),
        (KEY, moved(request_id="s"), rows),
        (KEY, moved(request_id="r\x001"), rows),
        (KEY, moved(epoch=2), rows),
        (KEY, moved(link_key="kv/2"), rows),
        (KEY, moved(layer=1), rows),
        (KEY, moved(num_layers=2), rows),
        (KEY, moved(head_start=1), rows),
        (KEY, moved(num_heads=1), rows),
        (KEY, moved(start=2), rows),
        (KEY, moved(num_tokens=3), rows),
        (KEY, place, rows.view(2, 3, 8, GROUPS)),
        (KEY, place, rows.view(torch.int32)),
        (KEY, place, rows[:, :2]),
    ]
    digests = [digest(*place) for place in places]

    assert len(set(digests)) == len(places)
    assert all(len(made) == 16 for made in digests)
    assert digest(KEY, moved(seq=9, digest=bytes(16)), rows) == digest(KEY, place, rows)


def test_a_digest_does_not_depend_on_strides(place: KVReady) -> None:
    """A view and its contiguous copy: same rows, same digest."""
    wide = torch.randn(2, 6, GROUPS, DIM)
    view = wide[:, 1:4]

    assert not view.is_contiguous()
    assert digest(KEY, place, view) == digest(KEY, place, view.contiguous())


@pytest.mark.parametrize(
    ("layers", "heads"),
    [((0, LAYERS), (0, GROUPS)), ((1, 1), (0, 1)), ((1, 2), (1, 1)), ((2, 1), (0, GROUPS))],
)
def test_a_part_goes_where_it_was_announced(
    layers: tuple[int, int], heads: tuple[int, int], cache: KVCache
) -> None:
    """Some layers and heads, from slots to other slots: the same rows, and nothing else changes."""
    message = KVReady("r", 1, "kv/1", *layers, *heads, 0, 3)
    source, destination = torch.tensor([3, 9, 4]), torch.tensor([0, 11, 30])
    before = everything(cache)
    rows = cache.pack(message, source)
    cache.unpack(message, destination, rows)
    expected = before.clone()
    layer, head = slice(layers[0], sum(layers)), slice(heads[0], sum(heads))
    expected[layer, :, destination, head] = before[layer, :, source, head]

    assert rows.is_contiguous() and rows.shape == (layers[1], 2, heads[1], 3, DIM)
    assert torch.equal(everything(cache), expected)
