"""Logits of draft trees and what their tokens were drawn from -> an accepted path by the ratio rule, and one more token.

For users who want the last bit of acceptance and give up "one text": the text follows the target's distribution exactly,
but which text a seed gives depends on the draft. With p the processed target distribution at a node (as in `verify`), q
what its children were drawn from, and its children x_1, x_2, ... in the order they were drawn:

    accept x if u q(x) < p(x), u uniform in [0, 1), strictly: p(x) = 0 is never accepted        (Leviathan, Chen)
    else p <- norm((p - q)+), and without replacement q <- norm(q without x); the next child, if there is one
    when none is left: emit y ~ p

A chain of single children is token-level speculative sampling; several children are recursive rejection sampling. Children
that were not drawn but chosen (most probable tokens, copies) count as drawn from a distribution that is that token alone.
Temperature 0 makes p the argmax. Nothing that was drawn may be dropped before this, whatever it is.

Accepting draws from the words of prompt index + 2^31, the last token from the noise of prompt index + 2^30: neither is the
noise that a coupled draft shares with its target, and each position uses both once.

Legend: N nodes (rows), S streams, V vocabulary, Q tokens that a q gives some mass to, D the deepest tree.
Source: Leviathan et al. 2211.17192, algorithm 1; Jeon et al. 2402.14160, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from paceline.kernels import verify_ratio_reference as reference
from paceline.kernels.dispatch import Backend, backend_of
from paceline.kernels.verify import Rows, Trees


@dataclass(frozen=True, slots=True)
class Draws:
    """What the children of each node were drawn from: the very numbers, after temperature and truncation.

    ids: int32 [N, Q], distinct in a row, -1 behind the last; of a node whose children were chosen, those children.
    q: float32 [N, Q], summing to 1 over the row; not read where children were chosen. is_drawn: bool [N].
    without_replacement: siblings are distinct draws, as from sorted perturbed scores.
    """

    ids_NQ: Tensor
    q_NQ: Tensor
    is_drawn_N: Tensor
    without_replacement: bool


class RatioVerdict(NamedTuple):
    """As in `Verified`: tokens and rows int32 [S, D + 1], -1 behind the last; num int32 [S]; usable bool [S]."""

    tokens_SD: Tensor
    rows_SD: Tensor
    num_S: Tensor
    usable_S: Tensor


def verify_ratio(
    logits_NV: Tensor, rows: Rows, trees: Trees, draws: Draws, *, backend: Backend | None = None
) -> RatioVerdict:
    """Verify the draft trees of a step by the ratio rule; the whole vocabulary, arguments as in `verify`.

    `backend` is "triton" or "reference", the plain twin. Prompt indices are below 2^30.
    """
    if backend_of(logits_NV, backend) == "reference":
        return reference.verify_ratio(logits_NV, rows, trees, draws)
    from paceline.kernels import verify_ratio_triton as triton

    return triton.verify_ratio(logits_NV, rows, trees, draws)
