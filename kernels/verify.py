"""Logits of the nodes of draft trees -> the token each node decides, the path each tree keeps, what is emitted.

    z = logits + bias and penalties, under the grammar's mask, over temperature
    kept = top-k of z, of those top-p, of those min-p; every filter keeps all ties at its boundary
    decided[n] = argmax over kept of z + gumbel(key n, id)        (temperature 0: argmax z; ties take the lowest id)
    walk: from the root to the first child that carries what its parent decided, as long as there is one

The kernels read the logits once where nothing is filtered, and never write anything of the vocabulary's size but, for
filtered rows, one maximum of each 32 ids. Nothing waits for the GPU and all launches have shapes that follow from the
tensors', so a step with a verification can be captured in a CUDA graph.

Vocabulary shards: each rank makes a `Part` of its columns, the leader joins them (`verify_parts`). The noise is counted by
global token id, so scores compare as they are.

Legend: N nodes (rows), S streams, V vocabulary or this shard of it, P changed entries, G masks, D the deepest tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from paceline.kernels import verify_reference as reference
from paceline.kernels.dispatch import Backend, backend_of


@dataclass(frozen=True, slots=True)
class Changes:
    """What bias, penalties and minimum lengths do to single entries, as `penalties.penalise` does it.

    starts: int32 [N + 1], the entries of row n are [starts[n], starts[n + 1]). ids: int32 [P], global, ascending in each
    row. bias, repetition, minus: float64 [P].
    """

    starts_N1: Tensor
    ids_P: Tensor
    bias_P: Tensor
    repetition_P: Tensor
    minus_P: Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens a grammar allows: bit id % 32 of word id / 32. Rows with the same parser state share a mask.

    words: int32 [G, ceil(V / 32)], by global id. of_row: int32 [N], -1 where everything is allowed.
    """

    words_GW: Tensor
    of_row_N: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """How each of N rows is sampled; all tensors on the logits' device.

    temperatures, top_ps, min_ps: float32 [N]; top_ks: int32 [N]. seeds, positions, choices, prompts: int64 [N], the noise
    key of the token the row decides (`keyed_noise.gumbel`). `is_filtered`: some sampled row has a filter; known to who
    builds this, so that no kernel has to be waited for.
    """

    temperatures_N: Tensor
    top_ks_N: Tensor
    top_ps_N: Tensor
    min_ps_N: Tensor
    seeds_N: Tensor
    positions_N: Tensor
    choices_N: Tensor
    prompts_N: Tensor
    is_filtered: bool
    changes: Changes | None = None
    masks: Masks | None = None


@dataclass(frozen=True, slots=True)
class Trees:
    """Draft trees of S streams, one behind the other in the rows.

    starts: int32 [S + 1], the nodes of stream s are rows [starts[s], starts[s + 1]), the root first. tokens: int32 [N].
    parents: int32 [N], counted in the tree, -1 at a root, below its own node otherwise. max_nodes, max_depth: no tree has more.
    """

    starts_S1: Tensor
    tokens_N: Tensor
    parents_N: Tensor
    max_nodes: int
    max_depth: int


class Verified(NamedTuple):
    """tokens: int32 [S, D + 1], what each stream emits, -1 behind it. rows: int32 [S, D + 1], the row that decided each.

    num: int32 [S], how many: the accepted ones and one. usable: bool [S], no row of the path had NaN, infinity or
    nothing left. decided: int32 [N]; decided_usable: bool [N].
    """

    tokens_SD: Tensor
    rows_SD: Tensor
    num_S: Tensor
    usable_S: Tensor
    decided_N: Tensor
    decided_usable_N: Tensor


class Part(NamedTuple):
    """What one vocabulary shard says about every row. All but the first four are of filtered rows, else not written.

    scores: float32 [N], ids: int32 [N]: its best perturbed score and that token. broken: int32 [N], 1 where there is NaN.
    tops: float32 [N], the largest z. masses: int64 [N], the sum of exp(z - top), in units of 2^-44. listed, listed_ids:
    float32, int32 [N, C], all of its tokens with z >= floor, in no order; found: int32 [N], how many; floors: float32 [N],
    minus infinity where the list is everything, infinity where the tokens to be kept may be more than C.
    """

    scores_N: Tensor
    ids_N: Tensor
    broken_N: Tensor
    tops_N: Tensor
    masses_N: Tensor
    listed_NC: Tensor
    listed_ids_NC: Tensor
    found_N: Tensor
    floors_N: Tensor


def verify(logits_NV: Tensor, rows: Rows, trees: Trees, *, backend: Backend | None = None) -> Verified:
    """Verify the draft trees of a step.

    Args:
        logits_NV: float32, bfloat16 or float16, raw, the last dimension contiguous; not changed.
        backend: "triton" or "reference", the plain twin.

    >>> from paceline.kernels.verify_reference import greedy_rows
    >>> trees = Trees(torch.tensor([0, 4]), torch.tensor([5, 7, 8, 9]), torch.tensor([-1, 0, 0, 1]), 4, 2)
    >>> logits = torch.nn.functional.one_hot(torch.tensor([7, 9, 0, 4]), 10).float()
    >>> verdict = verify(logits, greedy_rows(4), trees, backend="reference")
    >>> verdict.tokens_SD.tolist(), verdict.rows_SD.tolist()   # 7 is right, behind it 9, behind 9 comes 4
    ([[7, 9, 4]], [[0, 1, 3]])
    """
    if backend_of(logits_NV, backend) == "reference":
        return reference.verify(logits_NV, rows, trees)
    from paceline.kernels import verify_triton as triton

    return triton.verify(logits_NV, rows, trees)


def decide_rows(logits_NV: Tensor, rows: Rows, *, backend: Backend | None = None) -> tuple[Tensor, Tensor]:
    """Without trees: the token of each row, int32 [N], and whether the row was usable, bool [N]."""
    if backend_of(logits_NV, backend) == "reference":
        return reference.decide_rows(logits_NV, rows)
    from paceline.kernels import verify_triton as triton

    return triton.decide_rows(logits_NV, rows)


def part_of(logits_NV: Tensor, rows: Rows, first_id: int, *, capacity: int = 1024) -> Part:
    """A shard's part (Triton). `logits_NV` are the columns from `first_id` on, a multiple of 4."""
    from paceline.kernels import verify_triton as triton

    return triton.part_of(logits_NV, rows, first_id, capacity)


def verify_parts(parts: list[Part], rows: Rows, trees: Trees) -> tuple[Verified, Tensor]:
    """Join the parts of all shards (Triton): the verdict, and bool [N], the filtered rows that the lists do not settle.

    Such a row, one that keeps more tokens than were listed, has to be fetched whole and verified by `verify`: until then
    its stream's verdict means nothing.
    """
    from paceline.kernels import verify_triton as triton

    return triton.verify_parts(parts, rows, trees)
