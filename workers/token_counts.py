"""A step's emissions -> tokens by source and draft version, and steps by version; old versions' series are dropped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from prometheus_client import Counter

from paceline.cluster.metrics import Metrics
from paceline.cluster.types import SOURCE_NAMES

_MAX_VERSIONS = 16
"""A worker that lives for months meets a version a day. What no stream drafts with any more is no news."""
_NOBODY = "none"


class TokenCounts:
    """Counters that hot loops may use: children are looked up once a version, and touched once a step."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: OrderedDict[str, tuple[Counter, list[Counter]]] = OrderedDict()

    def add(self, emitted: Iterable[tuple[str, bytes]]) -> None:
        """For each stream of a step: the version that last drafted for it ("" if nobody did), its tokens' sources."""
        by_version: dict[str, list[bytes]] = {}
        for version, sources in emitted:
            by_version.setdefault(version, []).append(sources)
        for version, all_sources in by_version.items():
            steps, tokens = self._counters(version or _NOBODY)
            steps.inc(len(all_sources))
            joined = b"".join(all_sources)
            for source, counter in enumerate(tokens):
                if num := joined.count(source):
                    counter.inc(num)

    def _counters(self, version: str) -> tuple[Counter, list[Counter]]:
        found = self._known.get(version)
        if found is None:
            steps = self._metrics.stream_steps.labels(version)
            tokens = [self._metrics.tokens.labels(name, version) for name in SOURCE_NAMES]
            found = self._known[version] = (steps, tokens)
            if len(self._known) > _MAX_VERSIONS:
                self._forget(next(iter(self._known)))
        self._known.move_to_end(version)
        return found

    def _forget(self, version: str) -> None:
        del self._known[version]
        self._metrics.stream_steps.remove(version)
        for name in SOURCE_NAMES:
            self._metrics.tokens.remove(name, version)
