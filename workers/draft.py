"""Asks of decode workers -> draft trees, by the versions that control plans; drafts ahead while nobody asks.

One engine for all decode workers: what they ask at one time shares the forwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from paceline.cluster import failpoints, wire
from paceline.cluster.config import model_folder
from paceline.cluster.learning.publish import fetch
from paceline.cluster.speculation import SpareCore
from paceline.cluster.types import Directory, DraftAsk, DraftPlan, Drafts, Message
from paceline.workers.base import Worker
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.draft_versions import Aside, DraftVersions, VersionLoader

log = structlog.get_logger(__name__)

_LONG_TOKENS = 64
"""A stream with more to compute before its first proposal is answered behind the others."""


class DraftWorker(Worker):
    """Answers every decode worker that asks; all asks waiting at once share the forwards."""

    role = "draft"
    _engine: DraftEngine

    def load(self) -> None:
        draft = self.config.draft
        runner = self.load_model(self.config.model.draft, draft)
        self._engine = DraftEngine(
            runner,
            token_budget=draft.token_budget,
            metrics=self.metrics,
            prefix_cache=self.config.kv.prefix_cache,
        )
        self._asks: list[tuple[wire.Peer, DraftAsk, float]] = []
        """With the time at which they came."""
        self._spare_core = SpareCore()
        self._aside = Aside()
        self._control: wire.Peer | None = None
        self._versions = DraftVersions(
            self._engine,
            VersionLoader(model_folder(self.config.model.draft), runner, fetch),
            limit=self.config.learning.rollout.resident,
            aside=self._aside,
            post=self.post,
            worker_id=self.member.me.worker_id,
            changed=self._tell,
            metrics=self.metrics,
        )
        self._status = self._versions.status()
        self._beside = self._versions.beside

    # -- versions ----------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """The status changed: control hears it now, and the directory, by which decode workers know the weights."""
        status = self._versions.status()
        if status == self._status:
            return
        beside, self._beside = self._beside, self._versions.beside
        is_new = (status.live, self._beside) != (self._status.live, beside)
        self._status = status
        if self._control is not None:
            self._control.send_threadsafe(status)
        if is_new:
            self.soon(self.member.announce)

    def reports(self) -> Sequence[Message]:
        return () if self.state == "starting" else (self._status,)

    def on_directory(self, directory: Directory) -> None:
        if self.state != "starting":
            self._versions.targets = frozenset(
                worker.version for worker in directory.workers if worker.role == "decode" and worker.version
            )

    # -- asks --------------------------------------------------------------------------------------------

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        came_at = time.monotonic()
        if isinstance(message, DraftAsk):
            self.post(lambda: self._asks.append((peer, message, came_at)))
        else:
            super().on_message(peer, message)

    def handle(self, peer: wire.Peer, message: Message) -> None:
        if isinstance(message, DraftPlan):
            self._control = peer
            self._versions.receive(message)
        else:
            self.soon(lambda: peer.close(f"a draft worker has no use for {type(message).__name__}"))

    def peer_lost(self, peer: wire.Peer) -> None:
        self._engine.close_all(_prefix(peer))
        self._asks = [asked for asked in self._asks if asked[0] is not peer]
        if self._control is peer:
            self._control = None

    def has_work(self) -> bool:
        return bool(self._asks) or (self._engine.has_ahead and self._spare_core.may_work(time.monotonic()))

    def step(self) -> bool:
        """Answer who asks; while nobody does, draft ahead by one level and look again."""
        if self._asks:
            self._aside.busy()
            try:
                self._answer()
            finally:
                self._aside.idle()
            return True
        wall, cpu = time.perf_counter(), time.thread_time()
        num = self._engine.draft_ahead()
        self._spare_core.worked(time.monotonic(), time.perf_counter() - wall, time.thread_time() - cpu)
        return num > 0

    def _answer(self) -> None:
        """Apply everything that was asked, draft once for all, answer each peer's newest ask.

        Streams with much to compute first, newly opened ones, keep nobody waiting: they are answered after the others.
        """
        started = time.perf_counter()
        asks, self._asks = self._asks, []
        latest: dict[wire.Peer, DraftAsk] = {}
        wanted: dict[wire.Peer, dict[str, str]] = {}
        unknown: dict[wire.Peer, set[str]] = {}
        for peer, ask, _ in asks:
            latest[peer] = ask
            self._apply(peer, ask, wanted.setdefault(peer, {}), unknown.setdefault(peer, set()))
        keys = [key for members in wanted.values() for key in members]
        long = {key for key in keys if self._engine.num_missing(key) > _LONG_TOKENS}
        if not self._spare_core.may_work(time.monotonic()):
            self.metrics.draft_ahead.labels("paused").inc(len(keys))
        groups = [
            group for group in ([k for k in keys if k not in long], [k for k in keys if k in long]) if group
        ]
        for number, group in enumerate(groups or [[]]):
            self._answer_for(group, keys, latest, wanted, unknown if number == 0 else {})
            if number == 0:
                self._versions.waited(time.monotonic() - min(came_at for _, _, came_at in asks))
        self.metrics.steps.inc()
        self.metrics.step_seconds.observe(time.perf_counter() - started)
        if failpoints.enabled:
            failpoints.hit("mid_stream", *(name for members in wanted.values() for name in members.values()))

    def _answer_for(
        self,
        keys: list[str],
        asked: list[str],
        latest: dict[wire.Peer, DraftAsk],
        wanted: dict[wire.Peer, dict[str, str]],
        unknown: dict[wire.Peer, set[str]],
    ) -> None:
        """Draft for these of all `asked` streams and tell whoever asked, besides which streams are `unknown`."""
        depth = min(16, max(1, max((ask.depth for ask in latest.values()), default=1)))
        width = min(8, max(1, max((ask.width for ask in latest.values()), default=1)))
        floor = min((ask.floor for ask in latest.values()), default=0.0)
        trees, dropped = self._engine.propose(keys, depth, width, floor, asked) if keys else ([], [])
        if failpoints.enabled:
            failpoints.hit("mid_step", *(tree.request_id for tree in trees))
        by_stream = {tree.request_id: tree for tree in trees}
        for peer, ask in latest.items():
            members = wanted[peer]
            mine = tuple(
                by_stream[members[key]] for key in keys if key in members and members[key] in by_stream
            )
            lost = unknown.get(peer, set()) | {members[key] for key in dropped if key in members}
            if mine or lost:
                peer.send_threadsafe(Drafts(ask.step, self._versions.live, mine, tuple(sorted(lost))))

    def _apply(self, peer: wire.Peer, ask: DraftAsk, wanted: dict[str, str], unknown: set[str]) -> None:
        prefix = _prefix(peer)
        for opened in ask.opens:
            self._engine.open(prefix + opened.request_id, opened)
            wanted[prefix + opened.request_id] = opened.request_id
            unknown.discard(opened.request_id)
        for advance in ask.advances:
            key = prefix + advance.request_id
            if self._engine.advance(key, advance.base_len, advance.prefix_hash, advance.token_ids):
                wanted[key] = advance.request_id
            else:
                wanted.pop(key, None)
                unknown.add(advance.request_id)
        for closed in ask.closes:
            self._engine.close(prefix + closed)
            log.info("stream_drafted", request=closed)
            wanted.pop(prefix + closed, None)
            unknown.discard(closed)

    def metrics_text(self) -> bytes:
        if self.state != "starting":
            self._show_versions()
        return super().metrics_text()

    def _show_versions(self) -> None:
        gauge, beside = self.metrics.draft_versions, self._beside
        gauge.clear()
        for version in dict.fromkeys((self._status.live, *beside, *self._status.resident)):
            state = "live" if version == self._status.live else "beside" if version in beside else "held"
            gauge.labels(version, state).set(1)

    def num_streams(self) -> int:
        return len(self._engine) if self.state != "starting" else 0

    def blocks(self) -> tuple[int, int]:
        return (
            (self._engine.pool.num_used, self._engine.pool.num_free) if self.state != "starting" else (0, 0)
        )

    def version(self) -> str:
        return self._status.live if self.state != "starting" else ""

    def versions_beside(self) -> tuple[str, ...]:
        return self._beside if self.state != "starting" else ()


def _prefix(peer: wire.Peer) -> str:
    assert peer.identity is not None
    return f"{peer.identity.incarnation}/"
