"""Logits, trees and draws -> the verdict of `verify_ratio`, node by node in float64: the plain twin."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.kernels.keyed_noise_reference import gumbel_vocabulary, philox4x32
from paceline.kernels.verify_reference import processed

if TYPE_CHECKING:
    from paceline.kernels.verify import Rows, Trees
    from paceline.kernels.verify_ratio import Draws, RatioVerdict

ACCEPT_DOMAIN = 1 << 31
DRAW_DOMAIN = 1 << 30


def uniform(seed: int, position: int, choice: int, prompt: int, slot: int) -> float:
    """In [0, 1), 24 bits: decides the `slot`-th child of the node before `position`."""
    counter = tuple(torch.tensor([word]) for word in (slot, position, choice, prompt + ACCEPT_DOMAIN))
    key = (torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([(seed >> 32) & 0xFFFFFFFF]))
    return (int(philox4x32(counter, key)[0]) >> 8) * 2.0**-24


def verify_ratio(logits_NV: Tensor, rows: Rows, trees: Trees, draws: Draws) -> RatioVerdict:
    """See `paceline.kernels.verify_ratio.verify_ratio`."""
    from paceline.kernels.verify_ratio import RatioVerdict

    z_NV = processed(logits_NV, rows)
    usable_N = (~z_NV.isnan().any(-1) & z_NV.amax(-1).isfinite()).tolist()
    starts, tokens, parents = (t.tolist() for t in (trees.starts_S1, trees.tokens_N, trees.parents_N))
    keys = list(
        zip(
            *(t.tolist() for t in (rows.seeds_N, rows.positions_N, rows.choices_N, rows.prompts_N)),
            strict=True,
        )
    )
    width = trees.max_depth + 1
    emitted, deciders, nums, usables = [], [], [], []
    for first, stop in pairwise(starts):
        path, said = [first], []
        while usable_N[path[-1]]:
            at = path[-1]
            z_V, is_greedy = z_NV[at].double(), float(rows.temperatures_N[at]) == 0
            p_V = torch.zeros_like(z_V)
            if is_greedy:
                p_V[z_V.argmax()] = 1
            else:
                p_V = z_V.softmax(-1)
            children = [n for n in range(first + 1, stop) if parents[n] == at - first]
            child, p_V = _test(p_V, children, [tokens[n] for n in children], draws, at, keys[at])
            if child is None:
                seed, position, choice, prompt = keys[at]
                s, t, c, r = (torch.tensor([v]) for v in (seed, position, choice, prompt + DRAW_DOMAIN))
                noise_V = gumbel_vocabulary(s, t, c, r, len(p_V))[0].double()
                said.append(int(p_V.argmax() if is_greedy else (p_V.log() + noise_V).argmax()))
                break
            said.append(tokens[child])
            path.append(child)
        pad = [-1] * (width - len(path))
        emitted.append(said + [-1] * (width - len(said)))
        deciders.append(path + pad)
        nums.append(len(path))
        usables.append(all(usable_N[row] for row in path))
    tokens_SD, rows_SD, num_S = (torch.tensor(x, dtype=torch.int32) for x in (emitted, deciders, nums))
    return RatioVerdict(tokens_SD, rows_SD, num_S, torch.tensor(usables))


def _test(
    p_V: Tensor,
    children: list[int],
    tokens: list[int],
    draws: Draws,
    at: int,
    key: tuple[int, int, int, int],
) -> tuple[int | None, Tensor]:
    """The accepted child of node `at`, or None and what is left to emit from."""
    ids_Q, is_drawn = draws.ids_NQ[at].long(), bool(draws.is_drawn_N[at])
    q_V = torch.zeros_like(p_V)
    if is_drawn:
        there_Q = ids_Q >= 0
        q_V[ids_Q[there_Q]] = draws.q_NQ[at][there_Q].double()
    for slot, (child, token) in enumerate(zip(children, tokens, strict=True)):
        if not is_drawn:
            q_V = torch.zeros_like(p_V)
            q_V[token] = 1
        if uniform(*key, slot) * q_V[token] < p_V[token]:
            return child, p_V
        left_V = (p_V - q_V).clamp_min(0)
        if not left_V.sum() > 0:  # p = q but for rounding
            return child, p_V
        p_V = left_V / left_V.sum()
        if draws.without_replacement and is_drawn:
            q_V[token] = 0
            q_V = q_V / q_V.sum().clamp_min(1e-30)
    return None, p_V
