"""Committed tokens -> draft workers -> draft trees in a mailbox, taken if they are there in time.

Nothing here can fail a step: an answer that is late, stale, malformed or missing is the same as no draft. One that is
late is of use all the same if it foretold what was committed meanwhile: then its rest is the next step's draft.
A stream stays with its draft worker; when that is lost or leaves, it is opened with another one at once.

While drafts are in use a stream is told to its draft worker when it is admitted, so that both models compute its prompt
at the same time. While they are not, no prompt is sent for nothing: a stream is told when it is first asked for, and the
step after that does not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.cluster.config import SpeculationConfig
from paceline.cluster.metrics import Metrics
from paceline.cluster.router import sticky
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import DraftPatience, Tree, is_tree, prefix_hash, reroot
from paceline.cluster.types import DraftAdvance, DraftAsk, DraftOpen, Drafts, DraftTree, Message, WorkerInfo
from paceline.cluster.wire import Peer
from paceline.workers.drafters.base import Context, Drafter, draft_open, register
from paceline.workers.drafters.colocated import ColocatedDrafter

_MAX_NODES = 256
_MAX_REOPENED = 3
_IN_USE_S = 1.0
"""Drafts that nobody asked for so long are not in use."""
_MAX_UNANSWERED = 64
"""Asks whose times are kept; a worker that never answers must not fill the memory."""


@dataclass(slots=True)
class _Source:
    """One draft worker as seen from here."""

    worker: WorkerInfo
    patience: DraftPatience
    peer: Peer | None = None
    step: int = 0
    asked_at: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Drafting:
    """One stream at its draft worker."""

    stream: Stream
    source: _Source
    sent_len: int = 0
    """Tokens the draft worker was told of; 0 means it must be told all of them."""
    is_wanted: bool = False
    """It was asked for, or probably will be: if it could not be told yet, it is as soon as somebody is connected."""
    opened_at: int = 0
    """Its tokens when it was told from its first one on, in mid-stream: that answer may take long."""
    last_version: str = ""
    num_unknown: int = 0
    """Times in a row that it was told to the draft worker and not known there afterwards."""


class RemoteDrafter(Drafter):
    """All methods on the engine thread, except `deliver`."""

    name = "draft"

    def __init__(
        self,
        config: SpeculationConfig,
        metrics: Metrics,
        vocab_size: int,
        connect: Callable[[WorkerInfo], None],
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._connect = connect
        self._sources: dict[int, _Source] = {}
        self._routes: dict[str, WorkerInfo] = {}
        self._streams: dict[str, _Drafting] = {}
        self._ready: list[WorkerInfo] = []
        """Draft workers that take streams, by the last directory."""
        self._mailbox: dict[str, tuple[DraftTree, str]] = {}
        """Each stream's last reply, and the version of the weights that drafted it."""
        self._unknown: set[str] = set()
        self._arrived: dict[int, list[tuple[int, float]]] = {}
        self._changed = threading.Condition()
        self._weights, self._beside = "", ""
        self._last_asked = (-_IN_USE_S, 0)
        """When somebody was last asked for, and how many streams."""

    # -- who drafts --------------------------------------------------------------------------------------

    def route(self, key: str, worker: WorkerInfo) -> None:
        """The stream with this key, about to be opened, drafts at this worker and stays there."""
        self._routes[key] = worker

    def unroute(self, key: str) -> None:
        """The stream with this key will not be opened after all."""
        self._routes.pop(key, None)

    def connected(self, worker: WorkerInfo, peer: Peer) -> None:
        """The connection asked for by `connect` is up: streams that wait for it are opened."""
        source = self._sources.get(worker.incarnation)
        if source is not None:
            source.peer = peer
            self._tell([d.stream for d in self._streams.values() if d.source is source and d.is_wanted])

    def lost(self, incarnation: int) -> None:
        """A draft worker is gone: its streams go to others, or on without drafts."""
        source = self._sources.pop(incarnation, None)
        self._ready = [worker for worker in self._ready if worker.incarnation != incarnation]
        if source is not None:
            source.peer = None
            self._move(self._streams_of(source))

    def reroute(self, streams: Iterable[Stream], workers: Sequence[WorkerInfo]) -> None:
        """The directory's draft workers, ready or not: give streams without one, or with one that leaves, another."""
        self._ready = [worker for worker in workers if worker.state == "ready"]
        if self._ready:  # none for a moment is no new draft
            self._weights = ",".join(sorted({worker.version for worker in self._ready}))
            self._beside = ",".join(sorted({version for worker in self._ready for version in worker.beside}))
        leaving = {worker.incarnation for worker in workers if worker.state == "draining"}
        for incarnation in leaving & self._sources.keys() if self._ready else ():
            self._move(self._streams_of(self._sources[incarnation]))
        self._move([s for s in streams if s.request.speculate and s.key not in self._streams])

    def _streams_of(self, source: _Source) -> list[Stream]:
        return [drafting.stream for drafting in self._streams.values() if drafting.source is source]

    def _move(self, streams: Sequence[Stream]) -> None:
        """Open these streams with the draft workers that are theirs now, all of their tokens told anew."""
        for stream in streams:
            drafting = self._streams.pop(stream.key, None)
            if drafting is not None and drafting.sent_len:
                self._send(drafting.source, (), (), (stream.key,))
            worker = sticky(stream.request.id, self._ready)
            if worker is not None:
                self.route(stream.key, worker)
                self._open(
                    stream, is_wanted=self._is_in_use() or (drafting is not None and drafting.is_wanted)
                )

    # -- Drafter -----------------------------------------------------------------------------------------

    @property
    def weights(self) -> str:
        return self._weights

    @property
    def beside(self) -> str:
        return self._beside

    def open(self, stream: Stream) -> None:
        self._open(stream, is_wanted=self._is_in_use())

    def _is_in_use(self) -> bool:
        """Whether most of the streams that emit tokens were asked for lately, or there are none."""
        at, num_asked = self._last_asked
        num = sum(drafting.stream.num_output > 0 for drafting in self._streams.values())
        return num == 0 or (2 * num_asked >= num and time.monotonic() - at < _IN_USE_S)

    def _open(self, stream: Stream, *, is_wanted: bool) -> None:
        worker = self._routes.pop(stream.key, None)
        if worker is None:
            return
        source = self._sources.get(worker.incarnation)
        if source is None:
            source = _Source(worker, DraftPatience(self._config.max_wait_ms / 1000))
            self._sources[worker.incarnation] = source
            self._connect(worker)
        self._streams[stream.key] = _Drafting(stream, source, is_wanted=is_wanted)
        if is_wanted:
            self._tell([stream])

    def observe(self, streams: Sequence[Stream]) -> None:
        found = [self._streams[stream.key] for stream in streams if stream.key in self._streams]
        for drafting in found:
            drafting.is_wanted = True
        self._last_asked = time.monotonic(), len(found)
        self._tell(streams)

    def _tell(self, streams: Sequence[Stream]) -> None:
        by_source: dict[int, list[Stream]] = {}
        for stream in streams:
            drafting = self._streams.get(stream.key)
            if drafting is None or drafting.source.peer is None or drafting.num_unknown >= _MAX_REOPENED:
                continue
            by_source.setdefault(drafting.source.worker.incarnation, []).append(stream)
        for incarnation, members in by_source.items():
            self._ask(self._sources[incarnation], members)

    def _ask(self, source: _Source, streams: list[Stream]) -> None:
        """One frame: what is new of all these streams."""
        with self._changed:
            lost = self._unknown & {stream.key for stream in streams}
            self._unknown -= lost
        streams = [s for s in streams if s.key not in lost or self._may_reopen(s.key)]
        opens: list[DraftOpen] = []
        advances: list[DraftAdvance] = []
        for stream in streams:
            drafting = self._streams[stream.key]
            tokens = stream.token_ids
            if drafting.sent_len == 0 or stream.key in lost:
                opens.append(draft_open(stream))
                drafting.opened_at = stream.num_tokens if stream.num_output else 0
            elif drafting.sent_len < stream.num_tokens:
                known = drafting.sent_len
                new = tuple(tokens[known:].tolist())
                advances.append(DraftAdvance(stream.key, known, prefix_hash(tokens[:known]), new))
            drafting.sent_len = stream.num_tokens
        if not opens and not advances:
            return
        source.step += 1
        source.asked_at[source.step] = time.monotonic()
        if len(source.asked_at) > _MAX_UNANSWERED:
            source.asked_at.pop(next(iter(source.asked_at)))
        self._send(source, tuple(opens), tuple(advances), ())

    def _may_reopen(self, key: str) -> bool:
        """A stream its draft worker cannot hold (too long for it, a token it lacks) is not sent again and again."""
        drafting = self._streams[key]
        drafting.num_unknown += 1
        return drafting.num_unknown < _MAX_REOPENED

    def _send(
        self,
        source: _Source,
        opens: tuple[DraftOpen, ...],
        advances: tuple[DraftAdvance, ...],
        closes: tuple[str, ...],
    ) -> None:
        if source.peer is not None:
            shape = self._config
            message: Message = DraftAsk(
                source.step, opens, advances, closes, shape.depth, shape.width, shape.floor
            )
            source.peer.send_threadsafe(message)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        asked = {s.key: s for s in streams if self._is_asked(s)}
        began = time.monotonic()
        sources = {id(d.source): d.source for d in (self._streams[key] for key in asked)}
        waits = {name: source.patience.wait_s() for name, source in sources.items()}
        until = {key: began + waits[id(self._streams[key].source)] for key in asked}
        with self._changed:
            # Each stream waits for its own draft worker: one that hangs holds up nobody who drafts elsewhere.
            while waited := [until[key] for key, stream in asked.items() if not self._is_answered(stream)]:
                left = max(waited) - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            unanswered = {key for key, stream in asked.items() if not self._is_answered(stream)}
            unknown = self._unknown & asked.keys()
            found = {s.key: self._mailbox.pop(s.key) for s in streams if s.key in self._mailbox}
            arrived, self._arrived = self._arrived, {}
            if len(self._mailbox) + len(self._unknown) > 2 * len(self._streams):
                self._mailbox = {k: v for k, v in self._mailbox.items() if k in self._streams}
                self._unknown &= self._streams.keys()
        if asked:
            self._metrics.draft_wait_seconds.observe(time.monotonic() - began)
        self._note_answers(arrived)
        for name, source in sources.items():
            members = {key for key in asked if self._streams[key].source is source}
            if waits[name] > 0 and members <= unanswered:
                source.patience.missed()
        trees: list[Tree | None] = []
        for stream in streams:
            tree, outcome = self._tree(stream, found.get(stream.key))
            if tree is None and stream.key not in asked:
                outcome = "unasked"
            elif tree is None and stream.key in unknown:
                outcome = "unknown"
            self._metrics.draft_replies.labels(outcome).inc()
            trees.append(tree)
        return trees

    def close(self, stream: Stream) -> None:
        self._routes.pop(stream.key, None)
        drafting = self._streams.pop(stream.key, None)
        with self._changed:
            self._mailbox.pop(stream.key, None)
            self._unknown.discard(stream.key)
        if drafting is not None and drafting.sent_len:
            self._send(drafting.source, (), (), (stream.key,))

    def version(self, stream: Stream) -> str:
        drafting = self._streams.get(stream.key)
        return drafting.last_version if drafting is not None else ""

    # -- replies -----------------------------------------------------------------------------------------

    def deliver(self, incarnation: int, reply: Drafts) -> None:
        """A reply arrived (event loop's thread)."""
        with self._changed:
            # Streams that ended with their draft on the way are nobody's any more.
            for tree in reply.trees:
                if tree.request_id in self._streams:
                    self._mailbox[tree.request_id] = tree, tree.version or reply.version
                    self._unknown.discard(tree.request_id)
            self._unknown.update(key for key in reply.unknown if key in self._streams)
            self._arrived.setdefault(incarnation, []).append((reply.step, time.monotonic()))
            self._changed.notify()

    def _is_asked(self, stream: Stream) -> bool:
        """Whether its draft worker can be expected to answer in time."""
        drafting = self._streams.get(stream.key)
        return (
            drafting is not None
            and drafting.source.peer is not None
            and drafting.sent_len == stream.num_tokens != drafting.opened_at
        )

    def _is_answered(self, stream: Stream) -> bool:
        """Whether waiting any longer would bring nothing."""
        reply = self._mailbox.get(stream.key)
        return stream.key in self._unknown or (reply is not None and reply[0].base_len == stream.num_tokens)

    def _note_answers(self, arrived: dict[int, list[tuple[int, float]]]) -> None:
        """Round trips of the replies that came, late ones included."""
        for incarnation, replies in arrived.items():
            source = self._sources.get(incarnation)
            if source is None:
                continue
            for step, at in replies:
                for old in [s for s in source.asked_at if s < step]:
                    del source.asked_at[old]
                began = source.asked_at.pop(step, None)
                if began is not None:
                    source.patience.answered(at - began)
                    self._metrics.draft_round_trip_seconds.observe(at - began)

    def _tree(self, stream: Stream, found: tuple[DraftTree, str] | None) -> tuple[Tree | None, str]:
        """What a reply is good for, checked, and how it fared."""
        if stream.key not in self._streams or found is None:
            return None, "late"
        reply, version = found
        tokens, base_len = stream.token_ids, reply.base_len
        if not 0 < base_len <= len(tokens) or reply.prefix_hash != prefix_hash(tokens[:base_len]):
            return None, "late"
        if len(reply.tokens) > _MAX_NODES or not is_tree(
            reply.tokens, reply.parents, reply.scores, self._vocab_size
        ):
            return None, "malformed"
        nodes = reroot(reply.tokens, reply.parents, tokens[base_len:].tolist())
        if base_len < len(tokens) and not nodes:
            return None, "late"
        drafting = self._streams[stream.key]
        drafting.last_version = version
        drafting.num_unknown = 0
        outcome = "used" if base_len == len(tokens) else "rerooted"
        if not nodes:
            return None, outcome
        scores = [reply.scores[node] for node, _ in nodes]
        ids, parents = [reply.tokens[node] for node, _ in nodes], [parent for _, parent in nodes]
        return Tree.build(int(tokens[-1]), ids, parents, scores=scores), outcome


@register("draft")
def _make(context: Context) -> Drafter:
    """A draft model: the one in this process, or those of the draft workers."""
    speculation, vocab_size = context.speculation, context.target.vocab_size
    if context.draft is not None:
        return ColocatedDrafter(
            context.draft,
            vocab_size=vocab_size,
            depth=speculation.depth,
            width=speculation.width,
            floor=speculation.floor,
        )
    assert context.connect is not None, "neither a draft model here nor a way to reach draft workers"
    return RemoteDrafter(speculation, context.metrics, vocab_size, context.connect)
