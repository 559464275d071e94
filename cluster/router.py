"""Registrations, heartbeats, progress -> the directory; a stream -> (decode, prefill, draft) worker.

`DirectoryState`, `candidates` and `choose` are plain data and pure functions: the router's process uses them, and so do
gateways with the last directory they saw while the router is away.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import structlog

from paceline.cluster import failpoints, wire
from paceline.cluster.admission import DrainRate, Quarantine
from paceline.cluster.config import ClusterConfig
from paceline.cluster.metrics import Metrics
from paceline.cluster.prefixes import PrefixIndex
from paceline.cluster.rates import Rates
from paceline.cluster.types import (
    NO_PROBATION,
    NO_ROOM,
    NO_WORKER,
    QUARANTINED,
    Admit,
    Admitted,
    Assignment,
    Directory,
    Message,
    Progress,
    Register,
    Role,
    Route,
    Settle,
    Snapshot,
    WorkerInfo,
)
from paceline.cluster.types import Quarantine as QuarantineNotice

log = structlog.get_logger(__name__)

STREAM_TOKENS = 64
"""A stream in a decode worker weighs as much as this many prompt tokens that a newcomer would have to compute there."""
_OUTCOMES = {
    NO_WORKER: "no_worker",
    NO_ROOM: "no_room",
    NO_PROBATION: "no_probation",
    QUARANTINED: "quarantined",
}
_NODE_TOKENS = 8
"""KV of this many tokens crosses between nodes in the time one token is computed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the policy knows of one worker, for one stream."""

    worker: WorkerInfo
    num_streams: int = 0
    num_queued: int = 0
    """Prompt tokens that were given to it and are not computed yet."""
    num_hit: int = 0
    """Leading tokens of this stream that it may hold."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the configuration says about routing."""

    min_remote_tokens: int
    max_streams: int
    """In one decode worker, running and waiting, before new ones are turned away."""

    @classmethod
    def of(cls, config: ClusterConfig) -> Policy:
        return cls(config.kv.min_remote_tokens, config.decode.max_streams + config.decode.max_queue)


def ready_workers(workers: Iterable[WorkerInfo], role: Role, avoid: Iterable[int] = ()) -> list[WorkerInfo]:
    """Ready workers of a role, least loaded first, ties by name."""
    shunned = set(avoid)
    found = [w for w in workers if w.role == role and w.state == "ready" and w.incarnation not in shunned]
    return sorted(found, key=lambda w: (w.num_streams, w.worker_id))


def candidates(
    workers: Iterable[WorkerInfo], streams: Mapping[int, int], reserved: Collection[int] = ()
) -> list[Candidate]:
    """Ready workers with the streams that the caller knows to be in them; none that is reserved."""
    return [
        Candidate(w, streams.get(w.incarnation, 0))
        for w in workers
        if w.state == "ready" and w.incarnation not in reserved
    ]


def choose(route: Route, known: Iterable[Candidate], policy: Policy) -> Assignment:
    """The routing policy. Lowest cost wins, in tokens of prompt; ties by name.

    decode: streams there * STREAM_TOKENS + tokens it does not hold.
    prefill: tokens queued there + tokens it does not hold + tokens to send / 8 if they go to another node. None for a
    prompt of which too few tokens have to be computed or whose logits are wanted, nor if all are busy while the decode
    worker is idle.
    draft: one on the decode worker's node if there is any, always the same for the same stream.

    A stream that has to run alone gets a decode worker without other streams, and no others' help: whatever it does to
    a worker, it does to that one.
    """
    everyone = [c for c in known if c.worker.incarnation not in route.avoid]
    decodes = [c for c in everyone if c.worker.role == "decode"]
    if not decodes:
        return Assignment(route.request_id, route.epoch, None, reason=NO_WORKER)
    if route.alone:
        idle = [c for c in decodes if c.num_streams == 0]
        if not idle:
            return Assignment(route.request_id, route.epoch, None, reason=NO_PROBATION)
        chosen = min(idle, key=lambda c: c.worker.worker_id)
        return Assignment(route.request_id, route.epoch, chosen.worker, reason="probation")
    if route.is_new:
        decodes = [c for c in decodes if c.num_streams < policy.max_streams]
        if not decodes:
            return Assignment(route.request_id, route.epoch, None, reason=NO_ROOM)
    num_kv = route.num_tokens - 1  # the last token is the root of the first step
    decode = min(
        decodes,
        key=lambda c: (c.num_streams * STREAM_TOKENS + max(0, num_kv - c.num_hit), c.worker.worker_id),
    )
    prefill, reason = _choose_prefill(route, decode, everyone, policy)
    drafts = [c.worker for c in everyone if c.worker.role == "draft"] if route.speculate else []
    near = [w for w in drafts if w.node == decode.worker.node]
    draft = sticky(route.request_id, near or drafts)
    return Assignment(route.request_id, route.epoch, decode.worker, prefill, draft, reason)


def _choose_prefill(
    route: Route, decode: Candidate, everyone: list[Candidate], policy: Policy
) -> tuple[WorkerInfo | None, str]:
    """A prefill worker, or why there is none."""
    num_kv = route.num_tokens - 1
    num_missing = max(0, num_kv - decode.num_hit)
    if num_kv < policy.min_remote_tokens:
        return None, "short"
    if route.needs_prompt_logits:
        return None, "prompt_logits"
    if num_missing < policy.min_remote_tokens:
        return None, "prefix_hit"
    prefills = [c for c in everyone if c.worker.role == "prefill"]
    if not prefills:
        return None, "no_prefill_worker"
    if decode.num_streams == 0 and all(c.num_queued for c in prefills):
        return None, "prefill_busy"

    def cost(c: Candidate) -> tuple[int, int, str]:
        far = num_missing // _NODE_TOKENS if c.worker.node != decode.worker.node else 0
        return c.num_queued + max(0, num_kv - c.num_hit) + far, c.num_streams, c.worker.worker_id

    return min(prefills, key=cost).worker, ""


def sticky(request_id: str, workers: Iterable[WorkerInfo]) -> WorkerInfo | None:
    """The worker of a request by rendezvous hashing: when one comes or goes, only its own requests move."""

    def weight(worker: WorkerInfo) -> bytes:
        return hashlib.blake2b(f"{worker.worker_id}\0{request_id}".encode(), digest_size=8).digest()

    return max(workers, key=weight, default=None)


def _address(worker: WorkerInfo) -> tuple[int, str, int]:
    return worker.incarnation, worker.host, worker.port


class DirectoryState:
    """The last word of every worker. One entry per worker id; a new incarnation replaces the old one."""

    def __init__(self) -> None:
        self.revision = 0
        self._workers: dict[str, WorkerInfo] = {}

    def put(self, worker: WorkerInfo) -> bool:
        """Record a worker; True if its address, incarnation or state is news."""
        old = self._workers.get(worker.worker_id)
        if old is not None and old.incarnation > worker.incarnation:
            return False
        self._workers[worker.worker_id] = worker
        changed = old is None or _address(old) != _address(worker) or old.state != worker.state
        self.revision += changed
        return changed

    def drop(self, worker_id: str, incarnation: int) -> WorkerInfo | None:
        """Forget a worker that is gone, and say what was known of it; None if a newer incarnation took its place."""
        old = self._workers.get(worker_id)
        if old is None or old.incarnation != incarnation:
            return None
        del self._workers[worker_id]
        self.revision += 1
        return old

    def ready(self) -> list[WorkerInfo]:
        """Workers that take streams, in no order."""
        return [w for w in self._workers.values() if w.state == "ready"]

    def snapshot(self) -> Directory:
        """Everything, sorted by role and name."""
        return Directory(
            self.revision, tuple(sorted(self._workers.values(), key=lambda w: (w.role, w.worker_id)))
        )


@dataclass(slots=True)
class _Attempt:
    """One attempt that a gateway told of, or was told to make."""

    decode: int
    prefill: int
    num_prefill: int
    began: float


class Load:
    """What the gateways have running where, from what they were told and what they say. No heartbeat is as fresh."""

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}
        """By incarnation; no entry is zero."""
        self.queued: dict[int, int] = {}
        """Prompt tokens at prefill workers, likewise."""
        self._attempts: dict[tuple[int, str, int], _Attempt] = {}

    def put(self, gateway: int, message: Progress, now: float) -> float | None:
        """Take note; when this is the end of an attempt that was known, the seconds it took."""
        key = gateway, message.request_id, message.epoch
        old = self._attempts.pop(key, None)
        if old is not None:
            self._add(old, -1)
        if not message.decode and not message.prefill:
            return now - old.began if old is not None else None
        began = old.began if old is not None else now
        new = _Attempt(message.decode, message.prefill, message.num_prefill if message.prefill else 0, began)
        self._attempts[key] = new
        self._add(new, 1)
        return None

    def drop_gateway(self, gateway: int) -> None:
        """Its attempts are cancelled by the workers, which see its death as well."""
        for key in [key for key in self._attempts if key[0] == gateway]:
            self._add(self._attempts.pop(key), -1)

    def _add(self, attempt: _Attempt, sign: int) -> None:
        for incarnation in (attempt.decode, attempt.prefill):
            if incarnation:
                _count(self.streams, incarnation, sign)
        if attempt.prefill:
            _count(self.queued, attempt.prefill, sign * attempt.num_prefill)


def _count(counts: dict[int, int], key: int, change: int) -> None:
    counts[key] = counts.get(key, 0) + change
    if counts[key] == 0:
        del counts[key]


class Router:
    """The directory's process: listens, answers routes, tells everyone about changes."""

    def __init__(self, config: ClusterConfig, me: wire.Identity, *, node: str = "") -> None:
        self._config = config
        self._me = me
        self._node = node or socket.gethostname()
        self._peers: set[wire.Peer] = set()
        self._state = DirectoryState()
        self._listener: wire.Listener | None = None
        self._beat: asyncio.Task[None] | None = None
        self._policy = Policy.of(config)
        self._load = Load()
        self._prefixes = PrefixIndex()
        self._drain = DrainRate()
        self._quarantine = Quarantine()
        self._rates = Rates()
        """Of API keys with limits, over all gateways."""
        self._alone: dict[int, tuple[int, str]] = {}
        """Decode workers that are kept for one stream: incarnation -> (gateway, request id)."""
        self._metrics = Metrics("router")

    async def start(self, secret: bytes) -> tuple[str, int]:
        """Listen; the address workers and gateways connect to."""
        link = self._config.link
        liveness = wire.Liveness(link.ping_s, link.dead_s)
        self._listener = await wire.listen(link.interface, 0, self._me, secret, self, liveness=liveness)
        self._state.put(
            WorkerInfo(
                worker_id=self._me.worker_id,
                role="router",
                incarnation=self._me.incarnation,
                host=self._listener.host,
                port=self._listener.port,
                pid=os.getpid(),
                node=self._node,
                state="ready",
            )
        )
        self._beat = asyncio.create_task(self._beat_forever())
        return self._listener.host, self._listener.port

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
        for peer in list(self._peers):
            peer.close()
        if self._listener is not None:
            self._listener.close()

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if failpoints.enabled:
                failpoints.hit("beat")
            self._broadcast()
            self._report()

    def on_open(self, peer: wire.Peer) -> None:
        self._peers.add(peer)
        peer.send(self._state.snapshot())

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        assert peer.identity is not None
        sender = peer.identity.incarnation
        match message:
            case Register(worker):
                if self._state.put(worker):
                    log.info("worker_state", worker=worker.worker_id, role=worker.role, state=worker.state)
                    self._broadcast()
            case Route():
                assignment = self._route(sender, message)
                self._count(message, assignment)
                peer.send(assignment)
            case Progress():
                seconds = self._load.put(sender, message, time.monotonic())
                if seconds is not None:
                    self._drain.ended(seconds)
                if not message.decode:
                    self._release(sender, message.request_id)
            case Admit():
                who = sender, message.request_id
                standing = self._rates.admit(
                    message.key,
                    message.limits,
                    who,
                    message.tokens,
                    time.monotonic(),
                    is_let_in=message.is_let_in,
                )
                peer.send(Admitted(message.request_id, standing))
            case Settle(request_id, key, tokens):
                self._rates.settle(key, (sender, request_id), tokens)
            case QuarantineNotice(digests):
                for digest in digests:
                    self._quarantine.add(digest, time.monotonic())
                    log.warning("request_quarantined", digest=digest.hex(), gateway=peer.identity.worker_id)
            case _:
                peer.close(f"a router has no use for {type(message).__name__}")

    def on_close(self, peer: wire.Peer) -> None:
        self._peers.discard(peer)
        identity = peer.identity
        if identity is None or any(other.identity == identity for other in self._peers):
            return  # it came back before the end of its old connection was seen
        self._load.drop_gateway(identity.incarnation)
        self._rates.drop(identity.incarnation)
        self._release(identity.incarnation)
        self._prefixes.drop(identity.incarnation)
        self._alone.pop(identity.incarnation, None)
        gone = self._state.drop(identity.worker_id, identity.incarnation)
        if gone is not None:
            log.warning("worker_lost", worker=identity.worker_id, reason=peer.close_reason, state=gone.state)
            if gone.state != "draining" and gone.role != "control":  # which leaves without a word
                self._metrics.workers_lost.labels(gone.role).inc()
            self._broadcast()

    def _report(self) -> None:
        """This process's own figures, over the connection that control keeps to it."""
        workers = self._state.snapshot().workers
        control = {w.incarnation for w in workers if w.role == "control"}
        me = next((w for w in workers if w.incarnation == self._me.incarnation), None)
        peers = [p for p in self._peers if p.identity is not None and p.identity.incarnation in control]
        if me is None or not peers:
            return
        self._metrics.router_streams.set(sum(self._load.streams.values()))
        text = self._metrics.text()
        for peer in peers:
            peer.send(Snapshot(me, text))

    def _count(self, route: Route, assignment: Assignment) -> None:
        outcome = _OUTCOMES.get(assignment.reason, "no_worker")
        if assignment.decode is not None:
            outcome = "local" if assignment.prefill is None else "remote"
        self._metrics.routes.labels(outcome).inc()
        log.info(
            "stream_routed",
            request=route.request_id,
            epoch=route.epoch,
            outcome=outcome,
            decode=assignment.decode.worker_id if assignment.decode is not None else "",
            prefill=assignment.prefill.worker_id if assignment.prefill is not None else "",
        )

    def _route(self, gateway: int, route: Route) -> Assignment:
        if failpoints.enabled:
            failpoints.hit("route", route.request_id)
        now = time.monotonic()
        if self._quarantine.holds(route.digest, now):
            return Assignment(route.request_id, route.epoch, None, reason=QUARANTINED)
        if route.alone and not self._is_one_kept(gateway, route):
            return Assignment(route.request_id, route.epoch, None, reason=NO_PROBATION)
        assignment = choose(route, self._candidates(gateway, route), self._policy)
        decode, prefill = assignment.decode, assignment.prefill
        if decode is None:
            if assignment.reason == NO_ROOM:
                wait = self._drain.turn_away(now, sum(self._load.streams.values()))
                return msgspec.structs.replace(assignment, retry_after_s=wait)
            return assignment
        self._prefixes.note(decode.incarnation, route.marks, decode.kv_blocks_used + decode.kv_blocks_free)
        if prefill is not None:
            blocks = prefill.kv_blocks_used + prefill.kv_blocks_free
            self._prefixes.note(prefill.incarnation, route.marks, blocks)
        busy = Progress(
            route.request_id,
            route.epoch,
            decode.incarnation,
            prefill.incarnation if prefill is not None else 0,
            route.num_tokens - 1,
        )
        self._load.put(gateway, busy, now)
        return assignment

    def _candidates(self, gateway: int, route: Route) -> list[Candidate]:
        """Every ready worker that is not kept for another stream."""
        block_size = self._config.kv.block_size
        mine = gateway, route.request_id
        return [
            Candidate(
                worker,
                self._load.streams.get(worker.incarnation, 0),
                self._load.queued.get(worker.incarnation, 0),
                self._prefixes.num_hit(worker.incarnation, route.marks) * block_size,
            )
            for worker in self._state.ready()
            if self._alone.get(worker.incarnation, mine) == mine
            and (not route.alone or self._alone.get(worker.incarnation) == mine or worker.role != "decode")
        ]

    def _is_one_kept(self, gateway: int, route: Route) -> bool:
        """Send nobody else to one decode worker until this stream ended; False if it has to wait for that as well.

        Half of the workers, at least one, may be kept so. With none at all there is nothing to wait for here.
        """
        mine = gateway, route.request_id
        decodes = [w for w in self._state.ready() if w.role == "decode" and w.incarnation not in route.avoid]
        free = [w for w in decodes if w.incarnation not in self._alone]
        if not decodes or any(self._alone.get(w.incarnation) == mine for w in decodes):
            return True
        if not free or len(decodes) - len(free) >= max(1, len(decodes) // 2):
            return False
        chosen = min(free, key=lambda w: (self._load.streams.get(w.incarnation, 0), w.worker_id))
        self._alone[chosen.incarnation] = mine
        log.warning("worker_kept_for_one", worker=chosen.worker_id, request=route.request_id)
        return True

    def _release(self, gateway: int, request_id: str | None = None) -> None:
        """Workers kept for this stream, or for any of this gateway, serve everybody again."""
        for incarnation, (owner, name) in list(self._alone.items()):
            if owner == gateway and request_id in (None, name):
                del self._alone[incarnation]

    def _broadcast(self) -> None:
        directory = self._state.snapshot()
        for peer in self._peers:
            peer.send(directory)

    @property
    def directory(self) -> Directory:
        """The current directory, for status."""
        return self._state.snapshot()
