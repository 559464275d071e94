"""A step's logits where they lie, how its rows are drawn, its trees -> tokens, accepted paths, KV in place; one copy back.

What decides a step is launched behind its forward: fused verification, the walk through the trees, and the move of the
accepted nodes' KV. The host waits for nothing but one copy of a few bytes a row, and only when it asks what was decided;
until then it has time for other things (`Engine.step`). Raw logits stay on the device; whoever wants rows of them
fetches those (`paceline.workers.raw_logits`).

The plain twin is `paceline.workers.sampling.choose` on the host's copy of all logits, `Match`, and a move of each stream's
KV of its own. On a CPU the same path runs through the kernels' plain twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cluster.speculation import Tree
from paceline.cluster.types import Sampling
from paceline.kernels import verify, verify_reference
from paceline.kernels.dispatch import Backend
from paceline.kernels.keyed_noise import gumbel_vocabulary
from paceline.kernels.top_logits import top_rows
from paceline.workers.adjust import Changes, joined_changes
from paceline.workers.fused_sampling import Walk, children, rows_on, sent, trees_on
from paceline.workers.kv_cache import KVCache
from paceline.workers.raw_logits import Top
from paceline.workers.sampling import Sample, SamplingRows
from paceline.workers.verifiers.base import Verdict

Decided = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


def verify_step(
    logits_KV: Tensor, sample: Sample, cache: KVCache, *, backend: Backend | None = None
) -> DeviceRows:
    """Launch all that decides a step; waits for nothing.

    Args:
        logits_KV: raw, of the kept rows, any float type.
        sample: with a `walk`, or the rows are only decided and no KV moves.
        backend: of the kernels; None is what the device has.
    """
    params = sample.params
    if not params.positions:
        return DeviceRows(logits_KV)
    device = logits_KV.device
    rows_NV = logits_KV if sample.rows is None else logits_KV.index_select(0, sent(sample.rows, device))
    changes = joined_changes(sample.changes, sample.starts) if sample.changes else None
    rows = rows_on(params.samplings, params.positions, device, changes)
    if sample.walk is None:
        decided_N, usable_N = verify.decide_rows(rows_NV, rows, backend=backend)
        return DeviceRows(logits_KV, Pending(decided_N, usable_N))
    trees = trees_on(sample.walk.trees, device)
    found = verify.verify(rows_NV, rows, trees, backend=backend)
    if any(_can_branch(tree) for tree in sample.walk.trees):
        _commit(found.rows_SD, trees, sample.walk, cache, backend)
    pending = Pending(found.decided_N, found.decided_usable_N, found.rows_SD, sample.walk.trees)
    return DeviceRows(logits_KV, pending)


@torch.inference_mode()
def warm_up(cache: KVCache, vocab_size: int) -> None:
    """Compile what steps need now, not in the first requests. Writes into blocks that nobody owns yet.

    Greedy and sampled rows, filters, changed entries; plain steps, chains, and trees whose KV moves. What is compiled is
    kept on disk by Triton, so this takes long once on a machine.
    """
    table = list(range(-(-10 // cache.block_size)))
    changed = Changes(*(np.zeros(1, np.int64),) * 2, np.ones(1), np.ones(1), np.zeros(1))
    for sampling in (Sampling(0, 0.0), Sampling(0), Sampling(0, 0.8, 20, 0.9)):
        for depth, num_streams in product((0, 1, 3, 7), (1, 8)):
            parents = [-1, -1, *range(1, depth)][: depth and depth + 1]
            tree = Tree.build(0, [0] * len(parents), parents)
            num = num_streams * len(tree)
            params = SamplingRows([sampling] * num, [1] * num)
            walk = Walk([tree] * num_streams, [table] * num_streams, [0] * num_streams)
            logits = torch.zeros(num, vocab_size, dtype=cache.dtype, device=cache.device)
            for changes in ([], [changed]):
                sample = Sample(None, params, changes, [0] * len(changes), walk)
                assert verify_step(logits, sample, cache).decided is not None


def children_of(
    logits_BV: Tensor, rows: SamplingRows, width: int, changes: tuple[list[Changes], list[int]]
) -> tuple[list[list[int]], list[list[float]]]:
    """What a draft proposes in one place: the `width` best tokens of each row under the noise, and the softmax at them.

    [B][width] each; a filtered token has chance 0. Waits for the result. The twin is `best` of `perturb`, on the host.
    """
    device = logits_BV.device
    joined = joined_changes(*changes) if changes[0] else None
    given = rows_on(rows.samplings, rows.positions, device, joined)
    if given.is_filtered:
        z = verify_reference.processed(logits_BV, given)
    else:
        t = given.temperatures_N
        z = verify_reference.adjusted(logits_BV, given) / torch.where(t > 0, t, 1.0)[:, None]
    if not rows.is_greedy:
        keys = given.seeds_N, given.positions_N, given.choices_N, given.prompts_N
        noise = gumbel_vocabulary(*keys, z.shape[1])
        z = torch.where((given.temperatures_N > 0)[:, None], z + noise, z)
    ids, shares = children(z, min(width, z.shape[1]))
    both = torch.cat([ids.double(), shares.double()], dim=1).cpu()  # one copy; ids are exact in float64
    num = ids.shape[1]
    return both[:, :num].long().tolist(), both[:, num:].float().tolist()


def _can_branch(tree: Tree) -> bool:
    """An accepted path of it may skip nodes. A chain's KV stands where it belongs already."""
    return len(tree) > 2 and bool((np.diff(tree.parents) != 1).any())


def _commit(
    rows_SD: Tensor, trees: verify.Trees, walk: Walk, cache: KVCache, backend: Backend | None
) -> None:
    """Accepted nodes' KV to the slots of their positions, from the paths as they lie on the device."""
    paths_SD = rows_SD[:, 1:]
    local_SD = torch.where(paths_SD >= 0, paths_SD - trees.starts_S1[:-1, None], paths_SD)
    num_streams, width = len(walk.tables), max(map(len, walk.tables))
    flat = np.zeros(num_streams * (1 + width), np.int32)
    flat[:num_streams] = walk.starts
    for row, table in zip(flat[num_streams:].reshape(num_streams, width), walk.tables, strict=True):
        row[: len(table)] = table
    there = sent(flat, cache.device)
    tables_BX = there[num_streams:].view(num_streams, width)
    cache.commit(tables_BX, there[:num_streams], local_SD.contiguous(), backend=backend)


class Pending:
    """Tensors on their way to the host: what was decided, and the accepted paths if trees were walked."""

    def __init__(
        self,
        decided_N: Tensor,
        usable_N: Tensor,
        rows_SD: Tensor | None = None,
        trees: Sequence[Tree] = (),
    ) -> None:
        self._num = len(decided_N)
        self._sizes = [len(tree) for tree in trees]
        parts = [decided_N.int(), usable_N.int()]
        if rows_SD is not None:
            parts.append(rows_SD.int().flatten())
        flat = torch.cat(parts)
        is_cuda = flat.is_cuda
        self._here = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=is_cuda)
        self._here.copy_(flat, non_blocking=is_cuda)
        self._copied: Any = None
        if is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        self._decided: Decided | None = None

    def decided(self) -> Decided:
        """Token of each row, int64 [N], and whether it was usable, bool [N]. Waits for the device, once."""
        if self._decided is None:
            if self._copied is not None:
                self._copied.synchronize()
            found = self._here.numpy()
            num = self._num
            self._decided = found[:num].astype(np.int64), found[num : 2 * num].astype(np.bool_)
        return self._decided

    def verdicts(self) -> list[Verdict] | None:
        """Of each tree; None if none were walked."""
        if not self._sizes:
            return None
        tokens, _ = self.decided()
        paths = self._here.numpy()[2 * self._num :].reshape(len(self._sizes), -1)
        found, first = [], 0
        for size, path in zip(self._sizes, paths, strict=True):
            nodes = [int(row) for row in path if row >= 0]
            found.append(Verdict(tuple(row - first for row in nodes[1:]), int(tokens[nodes[-1]])))
            first += size
        return found


class DeviceRows:
    """Rows of one step's logits on their device; see `paceline.workers.raw_logits.PartedRows`."""

    def __init__(self, logits_KV: Tensor, pending: Pending | None = None) -> None:
        self._logits = logits_KV
        self._pending = pending

    @property
    def decided(self) -> Decided | None:
        return None if self._pending is None else self._pending.decided()

    @property
    def verdicts(self) -> Sequence[Verdict] | None:
        return None if self._pending is None else self._pending.verdicts()

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, rows: Any) -> DeviceRows:
        if isinstance(rows, slice):
            return DeviceRows(self._logits[rows])
        return DeviceRows(self._logits.index_select(0, sent(np.asarray(rows, np.int64), self._logits.device)))

    def gather(self) -> Tensor:
        """float32 [n, V] on the host."""
        return self._logits.float().cpu()

    def top(self, rows: Sequence[int], num_wanted: int) -> Top:
        """By the kernel that reads each row twice: three columns come to the host, not the rows."""
        device = self._logits.device
        wanted = sent(np.asarray(rows, np.int32), device)
        found = top_rows(self._logits, wanted, num_wanted, torch.zeros_like(wanted))
        log_probs = found.logits_RM - found.log_sums_R[:, None]
        return (
            found.ids_RM.cpu().numpy().astype(np.int32),
            log_probs.float().cpu().numpy(),
            found.log_sums_R.float().cpu().numpy(),
        )
