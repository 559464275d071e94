"""Shapes of verification and distillation -> rows of the kernels' card.

Logits are bfloat16, as a head leaves them: a bulk of normal noise with some tokens far above it, so that filters keep a
few of 152k, as on text. The torch side is what an engine without such kernels runs: float32, sort for the filters,
exponential noise of torch's own generator, argmax; nothing in it waits for the GPU either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from paceline.deploy.bench.kernel_rows import Row, Runs, nothing_else
from paceline.kernels import distill_loss
from paceline.kernels.verify import Masks, Rows, Trees

VOCAB = 151_936
_ROUND_SLOTS = 10 * 4 / 4
"""Of Philox, for a token: ten rounds of two wide multiplications and two three-way xors for four tokens."""
_SLOTS = 64
"""Such instructions that a multiprocessor of compute capability 9.0 starts in a cycle."""
_CLOCK_HZ = 1.755e9


def rows() -> list[Row]:
    """All of them."""
    found = []
    for name, streams, drafted, columns, figure in (
        ("verify sampled", 32, 4, {}, "gpu.verify"),
        ("verify greedy", 32, 4, {"temperature": 0.0}, ""),
        ("verify top-k 20 top-p 0.95", 32, 4, {"temperature": 0.7, "top_k": 20, "top_p": 0.95}, ""),
        ("verify top-p 0.95", 32, 4, {"top_p": 0.95}, ""),
        ("verify masked", 32, 4, {"mask": 0.02}, ""),
        ("verify sampled alone", 1, 4, {}, ""),
        ("verify sampled 64 x 8", 64, 7, {}, ""),
    ):
        num = streams * (drafted + 1)
        is_noisy = name.startswith("verify sampled")
        least = partial(_noise_seconds, num * VOCAB) if is_noisy else nothing_else
        found.append(
            Row(
                name,
                f"B={streams} K={drafted} V={VOCAB}",
                2 * num * VOCAB,
                partial(_verify, streams, drafted, columns),
                figure,
                least,
            )
        )
    found.append(Row("top 128", f"R=96 V={VOCAB}", 2 * 96 * VOCAB, _top))
    found.append(Row("distill loss", f"N=2048 M=128 V={VOCAB}", 3 * 2 * 2048 * VOCAB, _distill))
    return found


def _noise_seconds(num_tokens: int, device: torch.device) -> float:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return num_tokens * _ROUND_SLOTS / (processors * _SLOTS * _CLOCK_HZ)


def text_like(num: int, device: torch.device, seed: int) -> Tensor:
    """bfloat16 [num, VOCAB]: noise of width 2, and sixty tokens of each row up to 14 above it."""
    draw = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(num, VOCAB, generator=draw, device=device) * 2
    ids = torch.randint(0, VOCAB, (num, 60), generator=draw, device=device)
    heights = torch.rand(num, 60, generator=draw, device=device) ** 2 * 14 + 6
    return logits.scatter_(1, ids, heights).to(torch.bfloat16)


def rows_on(num: int, device: torch.device, columns: dict[str, float], seed: int) -> Rows:
    """All rows with the same parameters, each with a key of its own."""
    draw = torch.Generator(device).manual_seed(seed)
    keys = torch.randint(0, 2**31, (4, num), generator=draw, device=device)
    t = torch.full((num,), columns.get("temperature", 1.0), device=device)
    k = torch.full((num,), int(columns.get("top_k", 0)), dtype=torch.int32, device=device)
    p = torch.full((num,), columns.get("top_p", 1.0), device=device)
    masks = None
    if "mask" in columns:
        allowed = torch.rand(num, (VOCAB + 31) // 32, 32, generator=draw, device=device) < columns["mask"]
        words = (allowed.long() << torch.arange(32, device=device)).sum(-1)
        of_row = torch.arange(num, dtype=torch.int32, device=device)
        masks = Masks(torch.where(words >= 2**31, words - 2**32, words).int(), of_row)
    is_filtered = columns.get("temperature", 1.0) > 0 and ("top_k" in columns or "top_p" in columns)
    return Rows(
        t, k, p, torch.zeros_like(t), keys[0], keys[1], keys[2], keys[3], is_filtered=is_filtered, masks=masks
    )


def chains(streams: int, drafted: int, device: torch.device, seed: int) -> Trees:
    """A chain for each stream."""
    draw = torch.Generator(device).manual_seed(seed)
    size = drafted + 1
    tokens = torch.randint(0, VOCAB, (streams * size,), generator=draw, device=device).int()
    parents = torch.arange(-1, drafted, device=device).int().repeat(streams)
    starts = torch.arange(0, streams * size + 1, size, device=device).int()
    return Trees(starts, tokens, parents, max_nodes=size, max_depth=drafted)


def _verify(streams: int, drafted: int, columns: dict[str, float], device: torch.device, copy: int) -> Runs:
    from paceline.kernels import verify_triton

    num = streams * (drafted + 1)
    logits, given = text_like(num, device, copy), rows_on(num, device, columns, copy)
    trees = chains(streams, drafted, device, copy)
    others = {}
    if find_spec("flashinfer") and not columns:
        others["flashinfer"] = _flashinfer(logits, trees, streams, drafted)
    return Runs(
        lambda: verify_triton.verify(logits, given, trees),
        partial(torch_chain, logits, given, trees, columns),
        others,
    )


def _flashinfer(logits: Tensor, trees: Trees, streams: int, drafted: int) -> Callable[[], object]:
    """Its speculative sampling of chains, by the ratio rule: it takes probabilities of both models, in memory."""
    from flashinfer import sampling

    drafts = trees.tokens_N.view(streams, drafted + 1)[:, 1:].contiguous()
    q = torch.full((streams, drafted, VOCAB), 1 / VOCAB, device=logits.device)

    def run() -> object:
        p = logits.float().softmax(-1).view(streams, drafted + 1, VOCAB)
        return sampling.chain_speculative_sampling(q, drafts, p)

    return run


def torch_chain(logits: Tensor, given: Rows, trees: Trees, columns: dict[str, float]) -> Tensor:
    """The same work in torch operations, for chains; emitted tokens [S, K + 1], -1 behind the last."""
    z = logits.float()
    if given.masks is not None:
        bits = torch.arange(32, device=z.device)
        allowed = ((given.masks.words_GW[:, :, None] >> bits) & 1).bool().flatten(1)[:, : z.shape[1]]
        z = z.masked_fill(~allowed, -torch.inf)
    if columns.get("temperature", 1.0) > 0:
        z = z / given.temperatures_N[:, None]
        if given.is_filtered:
            ordered, ids = z.sort(dim=-1, descending=True)
            if "top_k" in columns:
                ordered[:, int(columns["top_k"]) :] = -torch.inf
            shares = ordered.softmax(-1)
            before = shares.cumsum(-1) - shares
            ordered = ordered.masked_fill(before >= given.top_ps_N[:, None], -torch.inf)
            z = torch.empty_like(z).scatter_(1, ids, ordered)
        z = z.softmax(-1) / torch.empty_like(z).exponential_()
    size = trees.max_nodes
    decided = z.argmax(-1).view(-1, size)
    drafted = trees.tokens_N.view(-1, size)[:, 1:]
    is_right = (decided[:, :-1] == drafted).cumprod(-1).bool()
    is_out = torch.cat([torch.ones_like(is_right[:, :1]), is_right], dim=1)
    return torch.where(is_out, decided, -1)


def _top(device: torch.device, copy: int) -> Runs:
    from paceline.kernels import top_logits_triton

    logits = text_like(96, device, copy)
    wanted = torch.arange(96, dtype=torch.int32, device=device)

    def plain() -> object:
        z = logits.float()
        return z.topk(128, dim=-1), z.logsumexp(-1)

    return Runs(lambda: top_logits_triton.top_rows(logits, wanted, 128, wanted), plain)


def _distill(device: torch.device, copy: int) -> Runs:
    from paceline.kernels.distill_loss_triton import KeptLogShares

    logits = text_like(2048, device, copy).requires_grad_()
    target = text_like(2048, device, copy + 1000).float()
    top = target.topk(128, dim=-1)
    temperatures = torch.ones(2048, device=device)
    p = distill_loss.target_shares(top.values, target.logsumexp(-1), temperatures, VOCAB)

    def run(function: type[torch.autograd.Function], z: Tensor) -> object:
        kept = function.apply(z, top.indices, temperatures)  # type: ignore[no-untyped-call]
        q = distill_loss.Shares(kept, 1 - kept.exp().sum(-1))
        return torch.autograd.grad(distill_loss.forward_kl(p, q).mean(), logits)

    return Runs(
        lambda: run(KeptLogShares, logits),
        lambda: run(distill_loss._KeptLogShares, logits.float()),
    )
