"""Faults on the way of a prompt's KV -> the same text, no token from KV that did not arrive whole, no block lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch

import harness as h
import oracle
from paceline.cluster.gateway.streams import StreamReport
from paceline.cluster.handoff import head_ranges
from paceline.cluster.types import KVReady, Reserve
from paceline.cluster.wire import Peer
from paceline.workers import kv_link
from paceline.workers.decode import DecodeWorker
from paceline.workers.draft import DraftWorker
from paceline.workers.engine import Engine
from paceline.workers.kv_link import Arrival
from paceline.workers.kv_receive import HandoffReceiver
from paceline.workers.prefill import PrefillWorker

NUM = 24
PROMPT = h.prompt(150, seed=3)
HOW = {"temperature": 0.8, "top_p": 0.9, "seed": 11}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    h.tiny_model(folder / "target", seed=0)
    h.tiny_model(folder / "draft", seed=0)
    return folder


@pytest.fixture(scope="session")
def expected(models: Path) -> list[int]:
    """What the oracle says to PROMPT."""
    params = oracle.Params(seed=11, temperature=0.8, top_p=0.9)
    tokens, gaps = oracle.generate(oracle.load(str(models / "target")), list(PROMPT), params, NUM)
    assert min(gaps) > oracle.NEAR_TIE, "choose another prompt: a near-tie would make the comparison moot"
    return tokens


async def test_disaggregated_text_is_the_oracles_and_took_the_remote_path(
    models: Path, expected: list[int]
) -> None:
    """KV came over the link, remote drafts were accepted, several chunks were streamed, the text is right."""
    async with h.cluster(models, "prefill.token_budget=64") as cluster:
        for kind in h.ALL:
            await cluster.add(kind, "0")

        tokens, report = await cluster.run(h.request("r", PROMPT, NUM, **HOW))

        assert tokens == expected
        assert report.kv_sources == ["link"]
        layers, heads, dim = 3, 2, 16
        assert report.kv_bytes == 2 * (len(PROMPT) - 1) * layers * heads * dim * 4
        assert report.tokens_by_source["draft"] > NUM // 3
        assert report.num_steps < NUM


async def test_received_kv_is_bit_equal_to_locally_computed_kv(models: Path) -> None:
    """The decode worker's pool after a hand-off holds the bits its own prefill in the same chunks would have made."""
    pools: list[torch.Tensor] = []
    for prefills in (True, False):
        async with h.cluster(models, "prefill.token_budget=64", "decode.token_budget=64") as cluster:
            decode = await cluster.add(DecodeWorker, "0")
            if prefills:
                await cluster.add(PrefillWorker, "0")
            _, report = await cluster.run(h.request("r", PROMPT, 1))
            assert report.kv_sources == ["link" if prefills else "local:no_prefill_worker"]
            cache = decode._engine.runner.cache
            num = len(PROMPT) - 1
            pools.append(torch.stack([cache.gather(i, torch.arange(num)) for i in range(3)]))

    # Chunk boundaries differ by the root's row, which oneDNN's packed linears and this attention do not notice.
    assert torch.equal(pools[0], pools[1])


async def test_a_flipped_bit_is_refused(
    models: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one message changes on the way: nothing of the hand-off is used, the text stays right."""
    original = HandoffReceiver._arrived
    flipped = []

    def flip(self: HandoffReceiver, peer: Peer, arrival: Arrival) -> None:
        if not flipped:
            bits = arrival.rows.view(torch.int32).view(-1)
            bits[17] ^= 1 << 3
            flipped.append(arrival.message)
        original(self, peer, arrival)

    monkeypatch.setattr(HandoffReceiver, "_arrived", flip)
    async with h.cluster(models, "kv.prefix_cache=false") as cluster:
        for kind in h.ALL:
            await cluster.add(kind, "0")

        tokens, report = await cluster.run(h.request("r", PROMPT, NUM, **HOW))

        assert flipped and tokens == expected
        assert report.kv_sources == ["local:digest"]
        again, report = await cluster.run(h.request("again", PROMPT, NUM, **HOW))
        assert again == expected and report.kv_sources == ["link"]


async def test_messages_of_a_stale_epoch_or_another_incarnation_are_refused(
    models: Path, expected: list[int]
) -> None:
    """A late sender's Reserve and KVReady for an older epoch, or from a former life, get a refusal and no block."""
    async with h.cluster(models, "link.first_reserve_s=1") as cluster:
        decode = await cluster.add(DecodeWorker, "0")
        prefill = await cluster.add(PrefillWorker, "0")
        peer = await prefill.member.peer_to(decode.member.info)
        layout = decode._engine.runner.cache.layout
        await cluster.run(h.request("warm", PROMPT, 1))
        before = _refused(decode)
        me = prefill.member.me

        heads = head_ranges(layout.num_kv_heads, 1)
        peer.send(Reserve("warm", 0, me.worker_id, me.incarnation, 149, layout, heads))
        peer.send(Reserve("warm", 7, me.worker_id, me.incarnation - 1, 149, layout, heads))
        peer.send(KVReady("warm", 0, "kv/0/0/1", 0, 3, 0, 2, 0, 149, 10_000, bytes(16)))
        await cluster.until(lambda: sum(_refused(decode).values()) >= sum(before.values()) + 3)
        tokens, _ = await cluster.run(h.request("r", PROMPT, NUM, **HOW))

        assert decode.blocks()[0] == 0
        assert tokens == expected


async def test_a_hung_sender_is_given_up_in_under_five_seconds(
    models: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender announces, gets its credit and never sends: the link is poisoned, both processes live on."""
    hung = asyncio.Event()
    loop = asyncio.get_running_loop()
    original = kv_link.LinkSender.credit

    def never(self: kv_link.LinkSender, seq: int, accept: bool) -> None:
        if loop.call_soon_threadsafe(hung.set) and not released:
            return
        original(self, seq, accept)

    released: list[bool] = []
    monkeypatch.setattr(kv_link.LinkSender, "credit", never)
    async with h.cluster(models, "link.timeout_s=1.5", "link.lease_s=3", "kv.prefix_cache=false") as cluster:
        for kind in h.ALL:
            await cluster.add(kind, "0")
        began = time.monotonic()

        tokens, report = await cluster.run(h.request("r", PROMPT, NUM, **HOW))
        seconds = time.monotonic() - began

        assert hung.is_set() and tokens == expected
        assert report.kv_sources == ["local:link_poisoned"]
        assert seconds < 5.0
        # The next request gets a new link under a new key, and that works.
        released.append(True)
        tokens, report = await cluster.run(h.request("next", PROMPT, NUM, **HOW))
        assert tokens == expected and report.kv_sources == ["link"]


async def test_a_prefill_worker_that_dies_in_mid_transfer_costs_only_a_recompute(
    models: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections close after half of the layers arrived; the decode worker computes the prompt itself."""
    async with h.cluster(models, "prefill.token_budget=32", "kv.prefix_cache=false") as cluster:
        for kind in h.ALL:
            await cluster.add(kind, "0")
        prefill = cluster.workers[0]
        original = HandoffReceiver._arrived
        seen: list[int] = []

        def die_after_four(self: HandoffReceiver, peer: Peer, arrival: Arrival) -> None:
            seen.append(arrival.message.seq)
            if len(seen) == 4:
                prefill.soon(lambda: asyncio.ensure_future(cluster.kill(prefill)))
            if len(seen) < 4:  # the rest is lost with its sender
                original(self, peer, arrival)

        monkeypatch.setattr(HandoffReceiver, "_arrived", die_after_four)

        tokens, report = await cluster.run(h.request("r", PROMPT, NUM, **HOW))

        assert len(seen) >= 4 and tokens == expected
        assert report.kv_sources == ["local:prefill_lost"]
        await cluster.until(lambda: all(w.role != "prefill" for w in cluster.gateway.directory.workers))
        tokens, report = await cluster.run(h.request("next", PROMPT, NUM, **HOW))
        assert tokens == expected and report.kv_sources == ["local:no_prefill_worker"]


async def test_a_decode_worker_that_dies_in_mid_stream_is_replaced_by_another(
    models: Path, expected: list[int]
) -> None:
    """The stream goes on elsewhere with the same text, each position once."""
    async with h.cluster(models) as cluster:
        await cluster.add(PrefillWorker, "0")
        await cluster.add(DecodeWorker, "a")
        await cluster.add(DecodeWorker, "b")
        await cluster.add(DraftWorker, "0")
        tokens: list[int] = []
        report = StreamReport()
        async for event in cluster.streams.run(h.request("r", PROMPT, NUM, **HOW), report):
            tokens.extend(event.tokens)
            if len(report.decode_workers) == 1 and len(tokens) >= 3:
                victim = next(w for w in cluster.workers if w.member.me.worker_id == report.decode_workers[0])
                await cluster.kill(victim)

        assert tokens == expected
        assert len(set(report.decode_workers)) == 2 and report.num_recoveries == 1
        assert report.kv_sources == ["link", "link"]


async def test_a_dead_or_hung_draft_worker_changes_no_text(
    models: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Death in mid-stream, and a worker that never answers: the stream goes on, without drafts."""
    async with h.cluster(models) as cluster:
        for kind in h.ALL:
            await cluster.add(kind, "0")
        draft = cluster.workers[2]
        # It reads its messages and never answers.
        monkeypatch.setattr(DraftWorker, "on_message", lambda *_: None)

        began = time.monotonic()
        tokens, report = await cluster.run(h.request("hung", PROMPT, NUM, **HOW))
        seconds = time.monotonic() - began
        await cluster.kill(draft)
        after, report_after = await cluster.run(h.request("dead", PROMPT, NUM, **HOW))

        assert tokens == expected and after == expected
        assert report.tokens_by_source == {"target": NUM} == report_after.tokens_by_source
        assert seconds < 3.0


async def test_an_engine_that_fails_moves_its_streams_and_fails_its_health_check(
    models: Path, expected: list[int]
) -> None:
    """An exception in the engine thread is a death like any other: connections close, Serve is told."""
    async with h.cluster(models) as cluster:
        await cluster.add(PrefillWorker, "0")
        await cluster.add(DecodeWorker, "a")
        await cluster.add(DecodeWorker, "b")
        report = StreamReport()
        tokens: list[int] = []
        async for event in cluster.streams.run(h.request("r", PROMPT, NUM, **HOW), report):
            tokens.extend(event.tokens)
            if len(report.decode_workers) == 1:
                first = next(w for w in cluster.workers if w.member.me.worker_id == report.decode_workers[0])
                first._engine.step = lambda: 1 / 0  # type: ignore[method-assign]
        await cluster.until(lambda: first.failure is not None)
        cluster.workers.remove(first)

        assert tokens == expected
        assert len(set(report.decode_workers)) == 2
        with pytest.raises(RuntimeError, match=f"engine thread of {report.decode_workers[0]} died"):
            first.check()


async def test_a_cancelled_stream_frees_its_blocks_everywhere(models: Path) -> None:
    """The consumer closes its iterator in mid-stream; a second later no worker holds anything of it."""
    async with h.cluster(models) as cluster:
        for kind in h.ALL:
            await cluster.add(kind, "0")
        events = cluster.streams.run(h.request("r", PROMPT, 500), StreamReport())
        async for event in events:
            if event.tokens:
                break
        await events.aclose()  # type: ignore[attr-defined]

        await cluster.until(lambda: all(w.num_streams() == 0 for w in cluster.workers), limit_s=1.0)
        assert all(w.blocks()[0] == 0 for w in cluster.workers if not isinstance(w, DraftWorker))


async def test_rows_of_a_request_that_came_again_are_not_taken_for_its_new_ones(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client leaves and sends another prompt under the same id; then the last message of the first one arrives."""
    original = HandoffReceiver._arrived
    held: list[Arrival] = []
    counted: list[int] = []

    def hold(self: HandoffReceiver, peer: Peer, arrival: Arrival) -> None:
        if not held:
            held.append(arrival)
            return
        if not counted:
            handoff = next(iter(self._open.values())).handoff
            before = handoff.received
            original(self, peer, held[0])
            counted.append(handoff.received - before)
        original(self, peer, arrival)

    other = h.prompt(150, seed=5)
    monkeypatch.setattr(HandoffReceiver, "_arrived", hold)
    async with h.cluster(models, "kv.prefix_cache=false", "prefill.token_budget=256") as cluster:
        await cluster.add(DecodeWorker, "0")
        await cluster.add(PrefillWorker, "0")
        first = asyncio.ensure_future(cluster.run(h.request("r", PROMPT, NUM, **HOW)))
        await cluster.until(lambda: held)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await cluster.until(lambda: all(worker.num_streams() == 0 for worker in cluster.workers))

        cluster.streams._num_runs = 0  # or the gateway would give it another name than the first had
        tokens, report = await cluster.run(h.request("r", other, NUM, **HOW))
        expected, _ = await cluster.run(h.request("alone", other, NUM, **HOW))

    assert counted == [0]
    assert tokens == expected and report.kv_sources == ["link"]


async def test_a_link_that_the_receiver_gave_up_is_dropped_by_the_sender(models: Path) -> None:
    """The next hand-off goes over a link under a new key; the old one's thread and rows are not kept beside it."""
    async with h.cluster(models, "kv.prefix_cache=false") as cluster:
        decode = await cluster.add(DecodeWorker, "0")
        prefill = await cluster.add(PrefillWorker, "0")
        await cluster.run(h.request("r", PROMPT, 1))
        (first,) = prefill._links.values()
        decode.post(lambda: decode._receiver._link_poisoned(first.key, "link_poisoned"))

        _, report = await cluster.run(h.request("again", PROMPT, 1))

        (second,) = prefill._links.values()
        assert report.kv_sources == ["link"] and second.key != first.key
        first._thread.join(5.0)
        assert not first._thread.is_alive() and second.is_usable


def _refused(worker: DecodeWorker) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in worker.metrics.kv_refused.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.labels["reason"]] = sample.value
    return found


@pytest.mark.parametrize("sizes", [(500,), (40, 900, 300)], ids=["equal", "mixed"])
async def test_full_pools_on_both_sides_drain(models: Path, sizes: tuple[int, ...]) -> None:
    """Two prefill and two decode workers with room for two prompts each, twenty streams at once: all end, none is wrong.

    Reservations are refused and asked for again; nobody waits for a block that somebody holds who waits for them.
    """
    small = [f"{role}.kv_memory_mb=1" for role in ("prefill", "decode")]
    settings = [*small, "prefill.token_budget=128", "decode.token_budget=128", "speculation.enabled=false"]
    asked = [h.request(f"r{i}", h.prompt(sizes[i % len(sizes)], seed=i), 60) for i in range(20)]
    async with h.cluster(models, *settings) as cluster:
        for name in "ab":
            await cluster.add(PrefillWorker, name)
            await cluster.add(DecodeWorker, name)
        decodes = [worker for worker in cluster.workers if isinstance(worker, DecodeWorker)]
        assert all(sum(worker.blocks()) * 16 < 1500 for worker in cluster.workers)
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*(cluster.run(one) for one in asked))

        refused = [_refused(worker).get("no_blocks", 0) for worker in decodes]
        sources = [source for _, report in outcomes for source in report.kv_sources]
        alone = Engine(decodes[0]._engine.runner, token_budget=128, max_streams=1, prefix_cache=False)

    assert [tokens for tokens, _ in outcomes] == [alone.run([one])[one.id] for one in asked]
    assert all(refused), "the pools were never full"
    assert sources.count("link") >= len(asked) // 2, sources
    assert all(report.num_recoveries == 0 for _, report in outcomes)
