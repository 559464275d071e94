"""Prompt tokens -> their KV in a decode worker's pool: reserve, compute in chunks, stream each layer, commit.

Computes all tokens but the last, which is the root of the decode worker's first step; there is no sampler here.
A hand-off that fails for any reason is dropped: the decode worker then computes the prompt itself.

Full pools cannot lock each other. Who holds what while waiting for whom: a reservation holds blocks of the decode worker
and waits for a turn here; a turn holds blocks here and waits for nobody, because its rows are copied out as they are
made and the youngest prompt gives way to older ones. A prompt without a reservation holds nothing anywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import structlog

from paceline.cluster import failpoints, wire
from paceline.cluster.errors import RequestError, WireError
from paceline.cluster.handoff import head_ranges
from paceline.cluster.scheduler import Plan, Stream
from paceline.cluster.types import (
    Abort,
    Cancel,
    Commit,
    CommitAck,
    Credit,
    Grant,
    KVPart,
    KVReady,
    Message,
    Prefill,
    Refuse,
    Request,
    Reserve,
    Sampling,
)
from paceline.workers.base import Worker
from paceline.workers.engine import Engine
from paceline.workers.kv_link import BACKENDS, LinkSender, check_backend
from paceline.workers.model_batch import KVSend
from paceline.workers.parallel.links import FarSender

log = structlog.get_logger(__name__)

JobKey = tuple[str, int]

_MESSAGE_BYTES = 1 << 20
"""Layers of a short chunk travel together until they are this long: a message has its price, whatever its length."""
_MAX_BACK_OFF = 16
"""How many times the pause that the decode worker asked for a refused reservation waits at most."""
_COMPUTE_LIMIT_S = 60.0
"""Grant to the last token computed."""


class JobState(Enum):
    WAITING = "waiting"
    RESERVING = "reserving"
    COMPUTING = "computing"
    COMMITTING = "committing"


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One hand-off, from here. Its blocks are the stream's, until all is staged or the hand-off ends."""

    message: Prefill
    gateway: wire.Peer
    decode: wire.Peer
    deadline: float
    state: JobState = JobState.WAITING
    since: float = field(default_factory=time.perf_counter)
    """When it was given to this worker, by the engine's clock."""
    ask_at: float = 0.0
    """When it may ask for blocks (again)."""
    num_refused: int = 0
    stream: Stream | None = None
    links: list[tuple[KVPart, LinkSender | FarSender]] = field(default_factory=list)
    num_messages: int = 0
    streamed: int = 0
    """Tokens that left, or leave with this step."""
    computed_at: float = 0.0

    @property
    def key(self) -> JobKey:
        return self.message.request_id, self.message.epoch

    @property
    def num_tokens(self) -> int:
        return len(self.message.token_ids) - 1


class PrefillWorker(Worker):
    """Owns one engine and one outgoing link for each decode worker it serves."""

    role = "prefill"
    _engine: Engine

    def load(self) -> None:
        prefill = self.config.prefill
        check_backend(self.config.link.backend)
        if self.config.kv.codec != "none":
            log.warning("kv_codec_is_lossy", codec=self.config.kv.codec)
        runner = self.load_model(
            self.config.model.target, prefill, int8_weights=self.config.model.int8_weights, tp=prefill.tp
        )
        self._engine = Engine(
            runner,
            token_budget=prefill.token_budget,
            max_streams=prefill.max_streams,
            max_context=self.config.limits.max_context,
            metrics=self.metrics,
            prefix_cache=self.config.kv.prefix_cache,
        )
        self._heads = head_ranges(runner.cache.layout.num_kv_heads, prefill.tp)
        self._jobs: dict[JobKey, PrefillJob] = {}
        self._by_stream: dict[str, PrefillJob] = {}
        self._links: dict[tuple[wire.Peer, str], LinkSender | FarSender] = {}
        self._sends: list[KVSend] = []
        """What leaves in this step."""
        self._busy_s = 0.0
        self._asked = (time.monotonic(), 0.0)

    # -- event loop's thread -----------------------------------------------------------------------------

    def on_others(self, peer: wire.Peer, message: Message) -> None:
        match message:
            case Prefill():
                self.spawn(self._accept(peer, message))
            case Credit(link_key, seq, accept):
                link = self._links.get((peer, link_key))
                if link is not None:
                    link.credit(seq, accept)
            case _:
                super().on_others(peer, message)

    async def _accept(self, gateway: wire.Peer, message: Prefill) -> None:
        """Connect to the decode worker, then let the engine thread take over."""
        try:
            decode = await self.member.peer_to(message.decode)
        except WireError as error:
            log.warning("decode_unreachable", request=message.request_id, error=str(error))
            gateway.send(Abort(message.request_id, message.epoch, "decode_unreachable"))
            return
        self.post(lambda: self._begin(gateway, decode, message))

    # -- engine thread -----------------------------------------------------------------------------------

    def _begin(self, gateway: wire.Peer, decode: wire.Peer, message: Prefill) -> None:
        limit = time.monotonic() + self.config.link.first_reserve_s
        job = PrefillJob(message, gateway, decode, limit)
        if job.key in self._jobs or job.num_tokens < 1:
            return
        self._jobs[job.key] = job

    def handle(self, peer: wire.Peer, message: Message) -> None:
        match message:
            case Grant(request_id, epoch):
                self._granted((request_id, epoch), message)
            case Refuse(request_id, epoch):
                self._refused((request_id, epoch), message)
            case CommitAck(request_id, epoch, ok, reason):
                job = self._jobs.get((request_id, epoch))
                if job is not None:
                    if ok:
                        self._received(job)
                    self._end(job, "" if ok else reason)
            case Abort(request_id, epoch, reason):
                job = self._jobs.get((request_id, epoch))
                if job is not None:
                    self._end(job, reason)
            case Cancel(request_id, epoch):
                job = self._jobs.get((request_id, epoch))
                if job is not None:
                    self._end(job, "cancelled", tell_decode=True)
            case _:
                self.soon(lambda: peer.close(f"a prefill worker has no use for {type(message).__name__}"))

    def _received(self, job: PrefillJob) -> None:
        """The decode worker has all of it."""
        exposed_s = time.monotonic() - job.computed_at
        self.metrics.kv_exposed_seconds.observe(exposed_s)
        request_id, epoch = job.key
        ms = round(1e3 * exposed_s, 2)
        log.info("kv_sent", request=request_id, epoch=epoch, tokens=job.num_tokens, exposed_ms=ms)

    def peer_lost(self, peer: wire.Peer) -> None:
        for job in list(self._jobs.values()):
            if job.decode is peer:
                self._end(job, "decode_lost")
            elif job.gateway is peer:
                self._end(job, "gateway_lost", tell_decode=True)
        for place in [place for place in self._links if place[0] is peer]:
            self._links.pop(place).close()

    def tick(self) -> None:
        """Reserve for the prompts whose turn is next; end what is over its time."""
        now = time.monotonic()
        jobs = sorted(self._jobs.values(), key=lambda job: job.message.priority)
        # A reservation holds the decode worker's blocks, so it is made one step ahead, no more.
        room = 2 * self.config.prefill.token_budget - sum(self._num_ahead(job) for job in jobs)
        free = self.config.prefill.max_streams - sum(job.state is not JobState.WAITING for job in jobs)
        for job in jobs:
            if now > job.deadline:
                self._end(job, "deadline", tell_decode=True)
            elif job.state is JobState.WAITING and now >= job.ask_at and room > 0 and free > 0:
                room -= job.num_tokens
                free -= 1
                self._reserve(job)

    @staticmethod
    def _num_ahead(job: PrefillJob) -> int:
        """Tokens of this job that have, or are about to have, a place in the queue of the engine."""
        if job.stream is not None:
            return job.stream.num_missing
        return job.num_tokens if job.state is JobState.RESERVING else 0

    def _reserve(self, job: PrefillJob) -> None:
        me = self.member.me
        request_id, epoch = job.key
        job.state = JobState.RESERVING
        layout = msgspec.structs.replace(self._engine.runner.cache.layout, codec=self.config.kv.codec)
        job.decode.send_threadsafe(
            Reserve(
                request_id,
                epoch,
                me.worker_id,
                me.incarnation,
                job.num_tokens,
                layout,
                self._heads,
            )
        )

    def _refused(self, key: JobKey, refusal: Refuse) -> None:
        job = self._jobs.get(key)
        if job is None or job.state is not JobState.RESERVING:
            return
        if refusal.retry_after_s <= 0:
            # What the decode worker's cache holds is no loss: the prompt's work is done.
            self._end(job, "" if refusal.reason == "prefix_hit" else refusal.reason)
        elif time.monotonic() > job.deadline:
            self._end(job, refusal.reason, tell_decode=True)
        else:
            job.state = JobState.WAITING
            pause = refusal.retry_after_s * min(2**job.num_refused, _MAX_BACK_OFF)
            job.num_refused += 1
            # Spread, so that those who wait for the same blocks do not keep asking in the same order.
            pause *= random.uniform(0.5, 1.0)
            job.ask_at = time.monotonic() + pause
            self.soon(lambda: self._wake_in(pause))

    def _wake_in(self, seconds: float) -> None:
        """Have the engine thread look at its jobs then, if it should be idle (event loop's thread)."""
        asyncio.get_running_loop().call_later(seconds, self.post, lambda: None)

    def _granted(self, key: JobKey, grant: Grant) -> None:
        job = self._jobs.get(key)
        if job is None or job.state is not JobState.RESERVING:
            return
        try:
            asked = job.message
            tokens = asked.token_ids[:-1]
            request = Request(
                asked.request_id,
                tokens,
                Sampling(0),
                0,
                speculate=False,
                priority=asked.priority,
                cache_salt=asked.cache_salt,
            )
            job.stream = self._engine.add_prefill(request, epoch=asked.epoch, token_ids=tokens)
            job.stream.waits_since = job.since
        except RequestError as error:
            log.warning("prefill_refused", request=key[0], error=str(error))
            self._end(job, "too_long", tell_decode=True)
            return
        self._by_stream[job.stream.key] = job
        job.streamed = grant.start
        self._drop_links_but(job.decode, {part.link_key for part in grant.parts})
        job.links = [(part, self._link_to(job.decode, grant, part)) for part in grant.parts]
        job.state = JobState.COMPUTING
        job.deadline = time.monotonic() + _COMPUTE_LIMIT_S

    def _drop_links_but(self, decode: wire.Peer, named: set[str]) -> None:
        """Drop links that the receiver names no more: it gave them up, with all that was to come over them."""
        for place in [place for place in self._links if place[0] is decode and place[1] not in named]:
            self._links.pop(place).close()

    def _link_to(self, decode: wire.Peer, grant: Grant, part: KVPart) -> LinkSender | FarSender:
        """The link that the receiver named, at the rank that has its heads: the one that is up, or a new one."""
        key = part.link_key
        link = self._links.get((decode, key))
        if link is not None and link.is_usable:
            return link

        def poisoned(key: str, reason: str) -> None:
            self.post(lambda: self._link_poisoned(decode, key, reason))

        config, store = self.config.link, (grant.store_host, grant.store_port)
        if part.sender_rank == 0:
            link = LinkSender(
                key,
                pair_key=decode.session_key,
                store=store,
                interface=config.interface,
                timeout_s=config.timeout_s,
                open_group=BACKENDS[config.backend],
                overlap=config.overlap,
                codec=self.config.kv.codec,
                on_poisoned=poisoned,
                announce=decode.send_threadsafe,
                on_sent=self._sent,
            )
        else:
            link = FarSender(
                key,
                self.ranks.peer(part.sender_rank),
                pair_key=decode.session_key,
                store=store,
                on_poisoned=poisoned,
                announce=decode.send_threadsafe,
                on_sent=self._sent,
            )
            self.ranks.add(link)
        self._links[decode, key] = link
        self.metrics.kv_links.labels("opened").inc()
        link.start()
        return link

    def _sent(self, num_bytes: int, digest_s: float) -> None:
        """A message left (a link's thread)."""
        self.metrics.kv_bytes.labels("sent").inc(num_bytes)
        self.metrics.kv_messages.labels("sent").inc()
        self.metrics.kv_digest_seconds.labels("sent").inc(digest_s)

    def _link_poisoned(self, decode: wire.Peer, key: str, reason: str) -> None:
        self.metrics.kv_links.labels("poisoned").inc()
        link = self._links.pop((decode, key), None)
        if link is not None:
            link.close()
        for job in [j for j in self._jobs.values() if any(of is link for _, of in j.links)]:
            self._end(job, reason, tell_decode=True)

    def has_work(self) -> bool:
        return self._engine.has_work

    def step(self) -> bool:
        began = time.monotonic()
        has_computed = self._step()
        self._busy_s += time.monotonic() - began
        return has_computed

    def load_share(self) -> float:
        """The share of time in which it computed since it was last asked: one prompt at a time may fill it."""
        now, busy_s = time.monotonic(), self._busy_s
        (then, before), self._asked = self._asked, (now, busy_s)
        return (busy_s - before) / max(now - then, 1e-9)

    def _step(self) -> bool:
        result = self._engine.step(on_layer=self._stream_layer, sends=self._plan_sends)
        for stream in result.computed:
            # Every row is copied out by now: the pool's blocks are free for the next prompt.
            job = self._by_stream.pop(stream.key)
            self._engine.remove(stream)
            job.stream = None
            job.state = JobState.COMMITTING
            job.computed_at = time.monotonic()
            job.deadline = job.computed_at + self.config.link.lease_s
            self._commit(job)
            if failpoints.enabled:
                failpoints.hit("committed", job.key[0])
        return result.num_rows > 0

    def _commit(self, job: PrefillJob) -> None:
        """Say that this was all, once every link has announced what it was given."""
        message = Commit(*job.key, self.member.me.incarnation, job.num_tokens, job.num_messages)
        calls = itertools.count(1)

        def commit() -> None:
            if next(calls) == len(job.links):
                job.decode.send_threadsafe(message)

        for _, link in job.links:
            link.after(commit)

    def _plan_sends(self, plan: Plan) -> list[KVSend]:
        """What this step's chunks give each link, and behind which layer; known before anything is computed."""
        self._sends = []
        for index, segment in enumerate(plan.segments):
            job = self._by_stream.get(segment.stream.key)
            if job is not None:
                # From where the last message ended: a preempted prompt is computed again from the start, and is not sent
                # twice; what was adopted from the prefix cache is computed by nobody, and is sent all the same.
                self._plan_job(job, index, segment.start + segment.num_rows)
        return self._sends

    def _plan_job(self, job: PrefillJob, segment: int, stop: int) -> None:
        """Messages with a job's tokens up to `stop`: of several layers together while they are short."""
        layout, num_tokens = self._engine.runner.cache.layout, stop - job.streamed
        if num_tokens < 1:
            return
        row_bytes = 2 * layout.num_kv_heads * layout.head_dim * self._engine.runner.cache.dtype.itemsize
        first, step = 0, self.config.prefill.token_budget
        for layer in range(layout.num_layers):
            is_last = layer == layout.num_layers - 1
            if not is_last and num_tokens * (layer + 1 - first) * row_bytes < _MESSAGE_BYTES:
                continue
            for start in range(job.streamed, stop, step):
                for part, link in job.links:
                    num = min(start + step, stop) - start
                    heads = (part.head_start, part.num_heads)
                    message = KVReady(*job.key, link.key, first, layer + 1 - first, *heads, start, num)
                    self._sends.append(KVSend(layer, segment, part.sender_rank, message))
                    job.num_messages += 1
            first = layer + 1
        job.streamed = stop

    def _stream_layer(self, plan: Plan, layer: int) -> None:
        """One layer's K and V of this step's chunks are in the pool: push what is to go now. Other ranks push theirs."""
        cache = self._engine.runner.cache
        for send in self._sends:
            if send.layer != layer or send.rank != 0:
                continue
            job, message = self._by_stream[plan.segments[send.segment].stream.key], send.message
            assert job.stream is not None
            table = self._engine.pool.table(job.stream.key)
            slots = cache.slots(table, message.start, message.start + message.num_tokens)
            if cache.device.type == "cuda":
                # One pass over the pool, on the device; on a CPU the link's thread takes the digest meanwhile.
                rows, mark = cache.pack_marked(job.decode.session_key, message, slots)
            else:
                rows, mark = cache.pack(message, slots), None
            link = next(link for _, link in job.links if link.key == message.link_key)
            assert isinstance(link, LinkSender)
            link.push(message, rows, mark)
            if failpoints.enabled:
                failpoints.hit("mid_transfer", job.key[0])

    def _end(self, job: PrefillJob, reason: str, *, tell_decode: bool = False) -> None:
        """Forget a hand-off and free its blocks. Staged rows stay with the link until their credits came."""
        self._jobs.pop(job.key, None)
        if job.stream is not None:
            self._by_stream.pop(job.stream.key, None)
            self._engine.remove(job.stream)
        if reason:
            self.metrics.kv_drops.labels(reason).inc()
            log.info("handoff_dropped", request=job.key[0], epoch=job.key[1], reason=reason)
            if tell_decode:
                job.decode.send_threadsafe(Abort(*job.key, reason))

    async def close(self) -> None:
        await super().close()
        if self.state != "starting":
            for link in self._links.values():
                link.close()

    # -- figures -----------------------------------------------------------------------------------------

    def num_streams(self) -> int:
        return len(self._jobs) if self.state != "starting" else 0

    def num_waiting(self) -> int:
        jobs = list(self._jobs.values()) if self.state != "starting" else []
        streams = [job.stream for job in jobs if job.state is not JobState.COMMITTING]
        return sum(stream is None or stream.waits_since is not None for stream in streams)

    def blocks(self) -> tuple[int, int]:
        return (
            (self._engine.pool.num_used, self._engine.pool.num_free) if self.state != "starting" else (0, 0)
        )

    def version(self) -> str:
        return self._engine.runner.version if self.state != "starting" else ""
