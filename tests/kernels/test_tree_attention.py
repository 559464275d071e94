"""Chunks and trees over a paged pool -> plain masked softmax attention, row by row in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels.tree_attention import KEY_BLOCK, AttentionSegment, tree_attention

TOLERANCE = 2e-5  # float32
NUM_SLOTS = 257


def random_parents(num: int, generator: np.random.Generator) -> list[int]:
    """Parents of a random topological tree: parents[0] = -1, parents[i] < i."""
    return [-1, *(int(generator.integers(0, node)) for node in range(1, num))]


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node and all above it."""
    seen = set()
    while node >= 0:
        seen.add(node)
        node = parents[node]
    return seen


class Packed:
    """Random segments over a shuffled pool, kept beside a plain description of what each row may see."""

    def __init__(
        self, seed: int, specs: list[tuple[str, int, int]], heads: int, groups: int, dim: int
    ) -> None:
        generator = np.random.default_rng(seed)
        free = list(generator.permutation(NUM_SLOTS))
        self.segments: list[AttentionSegment] = []
        self.seen: list[dict[int, int]] = []  # for each row: slot -> position of what it may see
        self.at: list[int] = []
        row = 0
        for kind, context, num in specs:
            slots = [int(free.pop()) for _ in range(context + num)]
            parents = random_parents(num, generator) if kind == "tree" else [node - 1 for node in range(num)]
            paths = [ancestors(parents, node) for node in range(num)]
            positions = [context + len(path) - 1 for path in paths]
            for node, path in enumerate(paths):
                visible = {slots[i]: i for i in range(context)}
                visible |= {slots[context + other]: positions[other] for other in path}
                self.seen.append(visible)
                self.at.append(positions[node])
            mask = None
            if kind == "tree":
                mask = torch.tensor([[other in path for other in range(num)] for path in paths])
            slots += [NUM_SLOTS] * (-len(slots) % KEY_BLOCK)  # the pool's zero row
            self.segments.append(
                AttentionSegment(row, num, context, torch.tensor(slots), torch.tensor(positions), mask)
            )
            row += num
        draw = torch.Generator().manual_seed(seed)
        self.q = torch.randn(row, heads, dim, generator=draw) * 2
        self.k = torch.randn(NUM_SLOTS + 1, groups, dim, generator=draw)
        self.v = torch.randn(NUM_SLOTS + 1, groups, dim, generator=draw)
        self.k[NUM_SLOTS] = self.v[NUM_SLOTS] = 0
        self.scaling = dim**-0.5

    def run(
        self, window: int | None = None, softcap: float | None = None, *, backend: str = "exact"
    ) -> Tensor:
        """The op itself."""
        return tree_attention(
            self.q,
            self.k,
            self.v,
            self.segments,
            scaling=self.scaling,
            window=window,
            softcap=softcap,
            backend=backend,
        )

    def expected(self, window: int | None = None, softcap: float | None = None) -> np.ndarray:
        """One row and one head at a time."""
        q, k, v = (tensor.double().numpy() for tensor in (self.q, self.k, self.v))
        share = q.shape[1] // k.shape[1]
        out = np.zeros((q.shape[0], q.shape[1], v.shape[-1]))
        for row, visible in enumerate(self.seen):
            slots = [s for s, at in visible.items() if window is None or at > self.at[row] - window]
            for head in range(q.shape[1]):
                scores = k[slots, head // share] @ q[row, head] * self.scaling
                if softcap is not None:
                    scores = np.tanh(scores / softcap) * softcap
                weight = np.exp(scores - scores.max())
                out[row, head] = weight / weight.sum() @ v[slots, head // share]
        return out


def worst(ours: Tensor, expected: np.ndarray) -> float:
    """Largest absolute difference."""
    return float(np.abs(ours.double().numpy() - expected).max())


FEW = [("chunk", 13, 3), ("tree", 30, 1), ("tree", 3, 17)]
MIXED = [("chunk", 0, 5), ("tree", 9, 7), ("chunk", 13, 3), ("tree", 0, 1), ("tree", 30, 1), ("tree", 3, 17)]


@pytest.mark.parametrize(
    ("heads", "groups", "dim"), [(1, 1, 1), (4, 4, 8), (4, 2, 16), (6, 2, 5), (8, 1, 3), (3, 3, 33)]
)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 4, 8])
@pytest.mark.parametrize("backend", ["exact", "fast", "reference"])
def test_attention_equals_plain_masked_softmax(
    heads: int, groups: int, dim: int, softcap: float | None, window: int | None, backend: str
) -> None:
    """Chunks and trees in one batch, odd shapes, grouped heads, windows and soft caps."""
    specs = FEW if backend == "fast" else MIXED  # with many segments "fast" takes the shared passes
    packed = Packed(heads * 100 + dim, specs, heads, groups, dim)

    ours = packed.run(window, softcap, backend=backend)
    assert worst(ours, packed.expected(window, softcap)) < TOLERANCE


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_see_their_ancestors_and_their_context_only(seed: int) -> None:
    """Random topological trees at random depths behind random contexts."""
    generator = np.random.default_rng(seed)
    specs = [("tree", int(generator.integers(0, 40)), int(generator.integers(1, 20))) for _ in range(3)]
    packed = Packed(seed, specs, 4, 2, 8)
    window = [None, 3, 9][seed % 3]

    assert worst(packed.run(window), packed.expected(window)) < TOLERANCE


@pytest.mark.parametrize("flip", ["hide an ancestor", "show a sibling"])
def test_one_wrong_bit_in_a_mask_is_noticed(flip: str) -> None:
    """Negative control: the comparison above has the power to find a single wrong mask bit."""
    packed = Packed(3, [("tree", 6, 9)], 4, 2, 8)
    mask = packed.segments[0].own_mask
    assert mask is not None
    lower = torch.ones_like(mask).tril(-1)
    row, column = ((mask if flip == "hide an ancestor" else ~mask) & lower).nonzero()[-1].tolist()
    mask[row, column] = ~mask[row, column]

    assert worst(packed.run(), packed.expected()) > 100 * TOLERANCE


def test_a_window_counts_positions_and_not_slots() -> None:
    """Negative control: siblings share a position, so a window over node indices gives another answer."""
    packed = Packed(4, [("tree", 6, 12)], 4, 2, 8)
    right = packed.run(window=4)
    packed.segments[0].positions = torch.arange(6, 18)
    packed.segments[0]._masks.clear()
    packed.segments[0].passes.clear()

    assert worst(packed.run(window=4), right.double().numpy()) > 100 * TOLERANCE


def test_layers_with_different_windows_share_a_segment() -> None:
    """Masks are kept by window: a full layer after a sliding one still sees everything."""
    packed = Packed(5, MIXED, 4, 2, 8)
    for window in (4, None, 8, None, 4):
        assert worst(packed.run(window), packed.expected(window)) < TOLERANCE


def test_slots_outside_a_segment_have_no_influence() -> None:
    """Garbage, even NaN, in slots of others never reaches a row."""
    packed = Packed(6, MIXED, 4, 2, 8)
    clean = packed.run()
    used = torch.cat([segment.key_slots for segment in packed.segments])
    others = torch.ones(NUM_SLOTS + 1, dtype=torch.bool)
    others[used] = False
    packed.k[others] = torch.nan
    packed.v[others] = torch.nan

    assert others.any()
    assert torch.equal(packed.run(), clean)


def test_a_segment_is_computed_the_same_alone_and_in_a_batch() -> None:
    """Bit for bit: the text must not depend on who else is in the step."""
    packed = Packed(7, MIXED, 4, 2, 8)
    together = packed.run(window=8)
    for segment in packed.segments:
        rows = slice(segment.row_start, segment.row_start + segment.num_rows)
        alone = AttentionSegment(
            0, segment.num_rows, segment.context_len, segment.key_slots, segment.positions, segment.own_mask
        )
        out = tree_attention(packed.q[rows], packed.k, packed.v, [alone], scaling=packed.scaling, window=8)

        assert torch.equal(out, together[rows])


@pytest.mark.parametrize(
    ("heads", "groups", "dim"), [(4, 2, 32), (8, 4, 32), (2, 2, 16), (15, 3, 80), (8, 8, 64)]
)
@pytest.mark.parametrize("window", [None, 24])
def test_a_row_has_the_same_bits_alone_in_a_chunk_and_in_a_tree(
    heads: int, groups: int, dim: int, window: int | None
) -> None:
    """The text must not depend on chunking or drafting; the plain twin, as a control, does depend on them."""
    generator = torch.Generator().manual_seed(dim)
    num, slots = 150, torch.randperm(200, generator=generator)
    q = torch.randn(num, heads, dim, generator=generator)
    k, v = (torch.randn(201, groups, dim, generator=generator) for _ in range(2))
    k[200] = v[200] = 0

    def rows(start: int, stop: int, mask: Tensor | None, backend: str) -> Tensor:
        keys = torch.full((-(-stop // KEY_BLOCK) * KEY_BLOCK,), 200)
        keys[:stop] = slots[:stop]
        segment = AttentionSegment(0, stop - start, start, keys, torch.arange(start, stop), mask)
        return tree_attention(
            q[start:stop], k, v, [segment], scaling=dim**-0.5, window=window, backend=backend
        )

    differences = {"exact": 0, "reference": 0}
    for backend in differences:
        whole = rows(0, num, None, backend)
        for start, stop in ((0, 1), (7, 9), (20, 23), (63, 71), (64, 128), (100, 150), (149, 150)):
            part = rows(start, stop, None, backend)
            chain = rows(start, stop, torch.ones(stop - start, stop - start).tril().bool(), backend)
            differences[backend] += int((part != whole[start:stop]).sum()) + int((chain != part).sum())

    assert differences["exact"] == 0
    assert differences["reference"] > 0


@pytest.mark.parametrize("unit", [4, 16, 64])
def test_runs_of_slots_give_the_same_bits_and_nothing_beyond_a_segment_counts(unit: int) -> None:
    """Gathering whole runs brings slots of others, or stale ones, along: not even NaN in them reaches a row."""
    generator = torch.Generator().manual_seed(unit)
    num_runs = 512 // unit
    runs = torch.randperm(num_runs, generator=generator)
    k, v = (torch.randn(512 + unit, 2, 8, generator=generator) for _ in range(2))
    k[512:] = v[512:] = 0
    q = torch.randn(60, 4, 8, generator=generator)
    segments: dict[int, list[AttentionSegment]] = {1: [], unit: []}
    used = torch.zeros(512 + unit, dtype=torch.bool)
    used[512:] = True
    row = 0
    for context, num in ((37, 1), (5, 3), (100, 40), (64, 16)):
        num_keys = context + num
        taken, runs = runs[: -(-num_keys // unit)], runs[-(-num_keys // unit) :]
        slots = (taken[:, None] * unit + torch.arange(unit)).view(-1)
        used[slots[:num_keys]] = True
        keys = torch.full((-(-num_keys // KEY_BLOCK) * KEY_BLOCK,), 512)
        keys[:num_keys] = slots[:num_keys]
        for size, found in segments.items():
            positions = torch.arange(context, num_keys)
            found.append(AttentionSegment(row, num, context, keys, positions, None, size))
        row += num

    def run(size: int, backend: str = "exact") -> Tensor:
        # Stored head by head, as the cache does.
        stored_k, stored_v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (k, v))
        return tree_attention(q, stored_k, stored_v, segments[size], scaling=0.3, backend=backend)

    expected = run(1)
    k[~used] = torch.nan
    v[~used] = torch.nan

    assert (~used).any()
    assert torch.equal(run(unit), expected)
    torch.testing.assert_close(run(unit, "fast"), expected, rtol=0, atol=1e-5)
