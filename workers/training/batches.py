"""A pool -> the requests of each optimiser step: fresh and old, no tenant above its share, every request in turn.

What comes next depends on the pool, the seed and three numbers of each tenant's turn, so a run that was killed goes on
with the batch that it would have had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.workers.training.pool import Pool, Sample


class Batches:
    """Draws batches; `state` and `restore` are what a kill must not lose."""

    def __init__(
        self, pool: Pool, *, batch_tokens: int, fresh_share: float, max_tenant_share: float, seed: int
    ) -> None:
        self._pool = pool
        self._batch_tokens = batch_tokens
        self._fresh_share = fresh_share
        self._max_tenant_share = max_tenant_share
        self._seed = seed
        self._order = {
            "fresh": _by_tenant(pool.fresh),
            "old": _by_tenant(pool.old),
        }
        """Ids by part and tenant as the run began: a turn counts places in it, also of what was deleted meanwhile."""
        self._turns: dict[str, list[int]] = {}
        """part:tenant -> [round, place in it]."""

    def next(self) -> list[Sample]:
        """The requests of one step; empty if there is nothing (left) to learn from."""
        parts = {"fresh": self._pool.fresh, "old": self._pool.old}
        rows = {name: sum(s.num_rows for s in part.values()) for name, part in parts.items()}
        share = self._fresh_share if rows["old"] else 1.0
        wanted = {"fresh": round(share * self._batch_tokens) if rows["fresh"] else 0}
        wanted["old"] = self._batch_tokens - wanted["fresh"] if rows["old"] else 0
        batch: list[Sample] = []
        for name, part in parts.items():
            available: dict[str, int] = defaultdict(int)
            for sample in part.values():
                available[sample.tenant] += sample.num_rows
            for tenant, quota in quotas(available, wanted[name], self._max_tenant_share).items():
                batch += self._take(name, tenant, part, quota)
        return batch

    def _take(self, name: str, tenant: str, part: Mapping[str, Sample], quota: int) -> list[Sample]:
        """The tenant's next requests until `quota` rows are full, none of them twice."""
        order = self._order[name].get(tenant, [])
        turn = self._turns.setdefault(f"{name}:{tenant}", [0, 0])
        taken: dict[str, Sample] = {}
        num_rows = 0
        mixed = self._mixed(turn[0], len(order))
        for _ in range(len(order)):
            if num_rows >= quota:
                break
            if turn[1] == len(order):
                turn[:] = [turn[0] + 1, 0]
                mixed = self._mixed(turn[0], len(order))
            sample = part.get(order[mixed[turn[1]]])
            turn[1] += 1
            if sample is not None and sample.request_id not in taken:
                taken[sample.request_id] = sample
                num_rows += sample.num_rows
        return list(taken.values())

    def _mixed(self, round_: int, num: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, round_, num]).permutation(num).tolist()
        return order

    def turns(self) -> dict[str, list[int]]:
        """Where everybody's turn stands now."""
        return {key: list(turn) for key, turn in self._turns.items()}

    def state(self, turns: Mapping[str, list[int]]) -> dict[str, Any]:
        """What `restore` needs to go on from these turns; JSON. Requests that are gone are not named in it."""
        order = {
            name: {tenant: [i if self._pool.get(i) else "" for i in ids] for tenant, ids in tenants.items()}
            for name, tenants in self._order.items()
        }
        return {"order": order, "turns": dict(turns)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what the pool has no more is passed over."""
        self._order = {name: dict(tenants) for name, tenants in state["order"].items()}
        self._turns = {key: list(turn) for key, turn in state["turns"].items()}


def ids_of(state: Mapping[str, Any]) -> frozenset[str]:
    """Requests that a state's batches are drawn from."""
    return frozenset(i for tenants in state["order"].values() for ids in tenants.values() for i in ids if i)


def quotas(available: Mapping[str, int], wanted: int, max_share: float) -> dict[str, int]:
    """Rows of a batch by tenant: by what each has, none above `max_share` as long as the others can fill the batch.

    Nobody gives more than it has: a batch would hold requests twice. Where the others have too little, the largest
    fills it up, since a batch of a few requests over and over would teach worse than one tenant's.

    >>> quotas({"a": 90_000, "b": 10_000}, 1000, 0.5)
    {'a': 500, 'b': 500}
    >>> quotas({"a": 90_000, "b": 100}, 1000, 0.5)
    {'a': 900, 'b': 100}
    >>> quotas({"a": 30, "b": 20}, 1000, 0.5)
    {'a': 30, 'b': 20}
    """
    total = sum(available.values())
    if total == 0 or wanted == 0:
        return {}
    limit = max_share * wanted if len(available) > 1 else wanted
    given = {tenant: min(wanted * rows / total, limit, rows) for tenant, rows in sorted(available.items())}
    while (left := wanted - sum(given.values())) > 0.5:  # to those who have more and are under the limit
        open_rows = {t: available[t] for t in given if given[t] < min(limit, available[t]) - 1e-9}
        if not open_rows:
            break
        weight = sum(open_rows.values())
        for tenant, rows in open_rows.items():
            given[tenant] = min(given[tenant] + left * rows / weight, limit, available[tenant])
    left = wanted - sum(given.values())
    for tenant in sorted(given, key=lambda name: -available[name]):
        more = min(left, available[tenant] - given[tenant])
        given[tenant] += more
        left -= more
    return {tenant: round(rows) for tenant, rows in given.items() if round(rows) > 0}


def _by_tenant(part: Mapping[str, Sample]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for sample in part.values():
        found[sample.tenant].append(sample.request_id)
    return dict(sorted(found.items()))
