"""Model folder, prompt and sampling parameters -> the one text P1 promises, computed the slow and obvious way.

transformers eager attention, batch 1, the whole sequence again for every token, no cache; a float64 sampler written
from the documented formulas. Imports nothing of Paceline: what agrees with it agrees with an independent reading.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

NEAR_TIE = 1e-5
"""A perturbed top-2 gap below this may fall either way in float32."""
BOUNDARY = 1e-6
"""So may a token this close to the boundary of a filter."""


@dataclass(frozen=True)
class Params:
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    choice: int = 0
    prompt_index: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0


def load(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


# --- sampler: at most 60 lines, float64 ---------------------------------------------------------------------


def philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def gumbel(params: Params, position: int, token: int) -> float:
    counter = [token >> 2, position, params.choice, params.prompt_index]
    x = philox(counter, [params.seed & 0xFFFFFFFF, (params.seed >> 32) & 0xFFFFFFFF])[token & 3]
    return -float(np.log(-np.log1p(-(x + 0.5) * 2.0**-32)))


def adjusted(
    logits: np.ndarray, params: Params, prompt: list[int], output: list[int], stop: tuple[int, ...] = ()
) -> np.ndarray:
    """Bias, repetition penalty (prompt and output), frequency and presence penalty (output), minimum length."""
    z = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        z[token] += bias
    for token in {*prompt, *output}:
        z[token] *= params.repetition_penalty ** (-1 if z[token] > 0 else 1)
    for token in set(output):
        z[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        z[list(stop)] = -np.inf
    return z


def perturbed(logits: np.ndarray, params: Params, position: int, slack: float = 0.0) -> np.ndarray:
    """Scores whose argmax is the token. `slack` moves every filter's boundary, > 0 to keep more."""
    z = logits.astype(np.float64)
    if params.temperature == 0:
        return z
    z = z / params.temperature
    if params.top_k:
        z = np.where(z >= np.sort(z)[-min(params.top_k, len(z))] - slack, z, -np.inf)
    if params.top_p < 1:
        order = np.sort(z)[::-1]
        p = np.exp(order - order[0])
        p /= p.sum()
        kept = order[: max(1, int((np.cumsum(p) - p < params.top_p + slack).sum()))]
        z = np.where(z >= kept[-1], z, -np.inf)
    if params.min_p > 0:
        z = np.where(z >= z.max() + min(0.0, np.log(params.min_p) - slack), z, -np.inf)
    alive = np.flatnonzero(np.isfinite(z))
    z[alive] += [gumbel(params, position, int(i)) for i in alive]
    return z


def decide(logits: np.ndarray, params: Params, position: int) -> tuple[int, float]:
    """The token, and the gap between the best and the second-best perturbed score (small: a near-tie)."""
    scores = perturbed(logits, params, position)
    best = int(np.argmax(scores))
    return best, float(scores[best] - np.delete(scores, best).max())


def is_near_tie(actual: int, logits: np.ndarray, params: Params, position: int) -> bool:
    """Whether rounding alone may have turned the decision into `actual`: a small gap, or a filter's boundary."""
    candidates = [perturbed(logits, params, position, slack) for slack in (BOUNDARY, -BOUNDARY)]
    return any(scores[actual] > scores.max() - NEAR_TIE for scores in candidates)


# --- statistics -----------------------------------------------------------------------------------------


def g_test(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value of counts against exact probabilities; cells that expect fewer than 5 are pooled."""
    counts, expect = counts.ravel().astype(np.float64), probs.ravel() * counts.sum()
    small = expect < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expect = np.append(expect[~small], expect[small].sum())
    assert not counts[expect == 0].any(), "something impossible was drawn"
    counts, expect = counts[expect > 0], expect[expect > 0]
    seen = counts > 0
    statistic = 2 * float((counts[seen] * np.log(counts[seen] / expect[seen])).sum())
    halves = torch.tensor([(len(counts) - 1) / 2, max(0.0, statistic) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


# --- generation -----------------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model: PreTrainedModel, prompt: list[int], params: Params, num_tokens: int, stop: tuple[int, ...] = ()
) -> tuple[list[int], list[float]]:
    """Output token ids and the gap at each of them."""
    ids, gaps = list(prompt), []
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()
        token, gap = decide(adjusted(logits, params, prompt, ids[len(prompt) :], stop), params, len(ids))
        ids.append(token)
        gaps.append(gap)
        if token in stop:
            break
    return ids[len(prompt) :], gaps


def assert_same_text(
    actual: list[int],
    model: PreTrainedModel,
    prompt: list[int],
    params: Params,
    num_tokens: int,
    stop: tuple[int, ...] = (),
) -> int:
    """Compare teacher-forced: each token of `actual` given those before it. Returns the number of near-ties."""
    near_ties = 0
    ids = list(prompt)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + actual]), use_cache=False).logits[0].double().numpy()
    assert len(actual) == num_tokens, f"{len(actual)} tokens, expected {num_tokens}"
    for index, token in enumerate(actual):
        row = adjusted(logits[len(prompt) - 1 + index], params, prompt, actual[:index], stop)
        expected, gap = decide(row, params, len(ids))
        if token != expected:
            assert is_near_tie(token, row, params, len(ids)), (
                f"token {index}: {token}, the oracle says {expected} with a gap of {gap:.2e}"
            )
            near_ties += 1
        ids.append(token)
    return near_ties
