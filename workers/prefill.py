"""Prompt tokens -> their KV in a decode worker's pool: reserve, compute in chunks, stream each layer, commit.

Computes all tokens but the last, which is the root of the decode worker's first step; there is no sampler here.
A hand-off that fails for any reason is dropped: the decode worker then computes the prompt itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

import structlog
import torch

from paceline.cluster import wire
from paceline.cluster.config import model_folder
from paceline.cluster.errors import RequestError, WireError
from paceline.cluster.scheduler import Plan, Stream
from paceline.cluster.types import (
    Abort,
    Cancel,
    Commit,
    CommitAck,
    Credit,
    Grant,
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
from paceline.workers.kv_cache import digest
from paceline.workers.kv_link import LinkSender
from paceline.workers.model_runner import load_runner

log = structlog.get_logger(__name__)

JobKey = tuple[str, int]


class JobState(Enum):
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
    state: JobState = JobState.RESERVING
    retry_at: float | None = None
    stream: Stream | None = None
    link: LinkSender | None = None
    num_messages: int = 0
    streamed: list[int] = field(default_factory=list)
    """Tokens announced, by layer."""

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
        torch.set_num_threads(prefill.threads)
        runner, reason = load_runner(
            model_folder(self.config.model.target),
            kv_memory_mb=prefill.kv_memory_mb,
            block_size=self.config.kv.block_size,
        )
        log.info(
            "model_ready",
            worker=self.member.me.worker_id,
            forward=runner.path,
            num_blocks=runner.cache.num_blocks,
            reason=reason,
        )
        self.metrics.forward.labels(runner.path).set(1)
        self._engine = Engine(
            runner,
            token_budget=prefill.token_budget,
            max_streams=prefill.max_streams,
            max_context=self.config.limits.max_context,
            metrics=self.metrics,
            prefix_cache=self.config.kv.prefix_cache,
        )
        self._jobs: dict[JobKey, PrefillJob] = {}
        self._by_stream: dict[str, PrefillJob] = {}
        self._links: dict[int, LinkSender] = {}

    # -- event loop's thread -----------------------------------------------------------------------------

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        match message:
            case Prefill():
                self.spawn(self._accept(peer, message))
            case Credit(link_key, seq, accept):
                for link in list(self._links.values()):
                    if link.key == link_key:
                        link.credit(seq, accept)
            case _:
                super().on_message(peer, message)

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
        job.retry_at = time.monotonic()

    def handle(self, peer: wire.Peer, message: Message) -> None:
        match message:
            case Grant(request_id, epoch):
                self._granted((request_id, epoch), message)
            case Refuse(request_id, epoch, reason, retry_after_s):
                job = self._jobs.get((request_id, epoch))
                if job is None or job.state is not JobState.RESERVING:
                    return
                if retry_after_s > 0 and time.monotonic() < job.deadline:
                    job.retry_at = time.monotonic() + retry_after_s
                else:
                    self._end(job, reason)
            case CommitAck(request_id, epoch, ok, reason):
                job = self._jobs.get((request_id, epoch))
                if job is not None:
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

    def peer_lost(self, peer: wire.Peer) -> None:
        for job in list(self._jobs.values()):
            if job.decode is peer:
                self._end(job, "decode_lost")
            elif job.gateway is peer:
                self._end(job, "gateway_lost", tell_decode=True)
        if peer.identity is not None:
            link = self._links.pop(peer.identity.incarnation, None)
            if link is not None:
                link.close()

    def tick(self) -> None:
        now = time.monotonic()
        # Reserve only when it is a prompt's turn: a reservation holds the decode worker's blocks.
        has_room = (
            sum(j.state is not JobState.RESERVING for j in self._jobs.values())
            < self.config.prefill.max_streams
        )
        for job in sorted(self._jobs.values(), key=lambda job: job.message.priority):
            if has_room and job.retry_at is not None and now >= job.retry_at:
                job.retry_at = None
                self._reserve(job)
            if now > job.deadline:
                self._end(job, "deadline", tell_decode=True)

    def _reserve(self, job: PrefillJob) -> None:
        me = self.member.me
        request_id, epoch = job.key
        job.decode.send_threadsafe(
            Reserve(
                request_id,
                epoch,
                me.worker_id,
                me.incarnation,
                job.num_tokens,
                self._engine.runner.cache.layout,
            )
        )

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
        except RequestError as error:
            log.warning("prefill_refused", request=key[0], error=str(error))
            self._end(job, "too_long", tell_decode=True)
            return
        self._by_stream[job.stream.key] = job
        job.streamed = [0] * self._engine.runner.cache.layout.num_layers
        job.link = self._link_to(job.decode, grant)
        job.state = JobState.COMPUTING
        job.deadline = time.monotonic() + 60.0

    def _link_to(self, decode: wire.Peer, grant: Grant) -> LinkSender:
        """The link the receiver named: the one that is up, or a new one in place of a poisoned one."""
        assert decode.identity is not None
        incarnation = decode.identity.incarnation
        link = self._links.get(incarnation)
        if link is not None and link.key == grant.link_key and link.is_usable:
            return link
        if link is not None:
            link.close()
        config = self.config.link
        link = LinkSender(
            grant.link_key,
            store=(grant.store_host, grant.store_port),
            interface=config.interface,
            timeout_s=config.timeout_s,
            on_poisoned=lambda key, reason: self.post(lambda: self._link_poisoned(incarnation, key, reason)),
            on_sent=lambda num_bytes: self.metrics.kv_bytes.labels("sent").inc(num_bytes),
        )
        self._links[incarnation] = link
        self.metrics.kv_links.labels("opened").inc()
        link.start()
        return link

    def _link_poisoned(self, incarnation: int, key: str, reason: str) -> None:
        self.metrics.kv_links.labels("poisoned").inc()
        link = self._links.get(incarnation)
        if link is not None and link.key == key:
            del self._links[incarnation]
            link.close()
        for job in [j for j in self._jobs.values() if j.link is not None and j.link.key == key]:
            self._end(job, reason, tell_decode=True)

    def has_work(self) -> bool:
        return self._engine.has_work

    def step(self) -> bool:
        result = self._engine.step(on_layer=self._stream_layer)
        for stream in result.computed:
            # Every row is staged with the link by now: the pool's blocks are free for the next prompt.
            job = self._by_stream.pop(stream.key)
            self._engine.remove(stream)
            job.stream = None
            job.state = JobState.COMMITTING
            job.deadline = time.monotonic() + self.config.link.lease_s
            request_id, epoch = job.key
            job.decode.send_threadsafe(
                Commit(request_id, epoch, self.member.me.incarnation, job.num_tokens, job.num_messages)
            )
        return result.num_rows > 0

    def _stream_layer(self, plan: Plan, layer: int) -> None:
        """One layer's K and V of this step's chunks are in the pool: stage, digest, announce."""
        for segment in plan.segments:
            job = self._by_stream.get(segment.stream.key)
            if job is None or job.link is None:
                continue
            # From where the last message ended: a preempted prompt is computed again from the start, and is not sent
            # twice; what was adopted from the prefix cache is computed by nobody, and is sent all the same.
            stop = segment.start + segment.num_rows
            for start in range(job.streamed[layer], stop, self.config.prefill.token_budget):
                self._send_rows(job, layer, start, min(start + self.config.prefill.token_budget, stop))

    def _send_rows(self, job: PrefillJob, layer: int, start: int, stop: int) -> None:
        """One message: a layer's K and V of the tokens [start, stop)."""
        assert job.stream is not None and job.link is not None
        job.streamed[layer] = stop
        cache = self._engine.runner.cache
        rows = cache.gather(layer, cache.slots(self._engine.pool.table(job.stream.key), start, stop))
        request_id, epoch = job.key
        mark = digest(self.secrets.link, request_id, epoch, layer, start, rows)
        seq = job.link.stage(rows)
        job.num_messages += 1
        job.decode.send_threadsafe(
            KVReady(request_id, epoch, job.link.key, seq, layer, start, stop - start, mark)
        )

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

    # -- figures -----------------------------------------------------------------------------------------

    def num_streams(self) -> int:
        return len(self._jobs) if self.state != "starting" else 0

    def blocks(self) -> tuple[int, int]:
        return (
            (self._engine.pool.num_used, self._engine.pool.num_free) if self.state != "starting" else (0, 0)
        )

    def version(self) -> str:
        return self._engine.runner.version if self.state != "starting" else ""
