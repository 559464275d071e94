"""Frames, handshakes and hard ends on real sockets: who may talk, in what order, and how fast an end is seen."""

import asyncio
import random
import socket
import struct
import time
import types as python_types
import typing
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cluster import types, wire
from paceline.cluster.errors import WireError
from paceline.cluster.types import Cancel, Commit, Credit, Hello, Message, Ping, Proof, Welcome

SECRET = b"s" * 32
QUICK = wire.Liveness(ping_s=0.05, dead_s=0.4)
DIALER, LISTENER = wire.Identity("dialer", 11), wire.Identity("listener", 22)
KINDS = typing.get_args(Message)


class Recorder:
    """A handler that keeps what happened."""

    def __init__(self) -> None:
        self.opened: list[wire.Peer] = []
        self.closed: list[wire.Peer] = []
        self.messages: list[Message] = []
        self._changed = asyncio.Event()

    def on_open(self, peer: wire.Peer) -> None:
        self.opened.append(peer)
        self._changed.set()

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        self.messages.append(message)
        self._changed.set()

    def on_close(self, peer: wire.Peer) -> None:
        self.closed.append(peer)
        self._changed.set()

    async def until(self, condition: Callable[[], object], limit_s: float = 5.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Place:
    """A listener with a recorder, and ways to reach it."""

    def __init__(self, here: Recorder, listener: wire.Listener) -> None:
        self.here = here
        self.host, self.port = listener.host, listener.port

    async def dial(
        self, there: Recorder | None = None, *, secret: bytes = SECRET, **how: typing.Any
    ) -> wire.Peer:
        how.setdefault("liveness", QUICK)
        return await wire.connect(self.host, self.port, DIALER, secret, there or Recorder(), **how)

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)


@asynccontextmanager
async def place(
    secret: bytes = SECRET, liveness: wire.Liveness = QUICK, me: wire.Identity = LISTENER
) -> AsyncIterator[Place]:
    """A listening socket for one test."""
    here = Recorder()
    listener = await wire.listen("127.0.0.1", 0, me, secret, here, liveness=liveness)
    try:
        yield Place(here, listener)
    finally:
        listener.close()
        for peer in here.opened:
            peer.close()
        await asyncio.sleep(0)


async def read_frame(reader: asyncio.StreamReader) -> Message:
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    message: Message = msgspec.msgpack.decode(await reader.readexactly(length), type=Message)
    return message


async def is_closed(reader: asyncio.StreamReader, limit_s: float = 2.0) -> bool:
    """Waits for the other side to end the connection, whatever it still sends; False if it does not."""
    try:
        await asyncio.wait_for(reader.read(), limit_s)
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def mark(seq: int) -> Credit:
    return Credit("k", seq)


# --- messages <-> frames --------------------------------------------------------------------------------


def values(annotation: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of a field's type, over the whole range that msgpack can carry."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and args[-1] is not ...:
        return st.tuples(*(values(arg) for arg in args))
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (python_types.UnionType, typing.Union):
        return st.one_of(*(values(arg) for arg in args))
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return st.builds(annotation, **{n: values(a) for n, a in typing.get_type_hints(annotation).items()})
    plain = {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
        type(None): st.none(),
    }
    return plain[annotation]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_survives_its_frame(kind: type[msgspec.Struct]) -> None:
    """What is decoded equals what was encoded, type by type, for values over the whole range of each field."""

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(values(kind))
    def check(message: Message) -> None:
        frame = wire.encode_frame(message)
        (length,) = struct.unpack_from(">I", frame)
        back = msgspec.msgpack.decode(frame[4:], type=Message)
        assert length == len(frame) - 4
        assert type(back) is kind and back == message

    check()


def test_every_struct_is_a_message_or_part_of_one() -> None:
    """A message type that was left out of the union could be sent and never be read."""
    structs = {v for v in vars(types).values() if isinstance(v, type) and issubclass(v, types.Struct)}
    parts = {types.Struct, types.Sampling, types.Request, types.WorkerInfo, types.Delta, types.KVLayout}
    parts |= {
        types.DraftOpen,
        types.DraftAdvance,
        types.DraftTree,
        types.Logprobs,
        types.HeadRange,
        types.KVPart,
        types.DraftRef,
        types.ServedStream,
        types.TrainOrder,
    }

    assert structs - parts == set(KINDS)


async def test_frames_survive_any_cut_of_the_byte_stream() -> None:
    """TCP keeps no borders: single bytes, halves and several frames at once give the same messages."""
    async with place() as spot:
        reader, writer = await spot.raw()
        await shake_hands(reader, writer)
        dice = random.Random(5)
        sent = [mark(seq) if seq % 3 else Cancel("x" * dice.randrange(900), seq) for seq in range(120)]
        data = b"".join(wire.encode_frame(message) for message in sent)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        at = 0
        while at < len(data):
            size = dice.choice([1, 2, 3, 5, 700, 3000])
            writer.write(data[at : at + size])
            at += size
            await asyncio.sleep(0)
        await spot.here.until(lambda: len(spot.here.messages) == len(sent))
        writer.close()

    assert spot.here.messages == sent


def test_a_message_over_the_limit_is_refused_by_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the message and both sizes, before a byte is sent."""
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)

    with pytest.raises(WireError, match=r"Cancel of \d+ bytes is over the limit of 100"):
        wire.encode_frame(Cancel("x" * 200, 1))


# --- the handshake --------------------------------------------------------------------------------------


async def shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, secret: bytes = SECRET
) -> Welcome:
    """The connecting side's part, by hand."""
    hello = Hello(wire.PROTOCOL, "dialer", 11, b"n" * 16)
    writer.write(wire.encode_frame(hello))
    welcome = await read_frame(reader)
    assert isinstance(welcome, Welcome)
    them = wire.Identity(welcome.worker_id, welcome.incarnation)
    proof = wire._prove(secret, "connecting", hello, them, welcome.nonce)
    writer.write(wire.encode_frame(Proof(proof)))
    return welcome


async def test_both_sides_learn_who_the_other_is() -> None:
    """After the handshake each side holds the other's name and incarnation, and messages flow both ways."""
    there = Recorder()
    async with place() as spot:
        peer = await spot.dial(there, expect_incarnation=22)
        await spot.here.until(lambda: spot.here.opened)
        peer.send(mark(1))
        spot.here.opened[0].send(mark(2))
        await spot.here.until(lambda: spot.here.messages)
        await there.until(lambda: there.messages)

        assert peer.is_open and peer.identity == LISTENER
        assert spot.here.opened[0].identity == DIALER
        assert (spot.here.messages, there.messages) == ([mark(1)], [mark(2)])


async def test_a_dialer_refuses_a_listener_with_another_secret() -> None:
    """Neither handler hears anything of a connection whose ends do not share the secret."""
    there = Recorder()
    async with place(secret=b"t" * 32) as spot:
        with pytest.raises(WireError, match="listening side does not know the link secret"):
            await spot.dial(there)
        await asyncio.sleep(0.02)

        assert not there.opened and not there.closed and not there.messages
        assert not spot.here.opened and not spot.here.closed and not spot.here.messages


async def test_a_listener_refuses_a_dialer_with_another_secret() -> None:
    """A dialer that skips its own check is closed at its proof; what it sends behind it is never delivered."""
    async with place() as spot:
        reader, writer = await spot.raw()
        await shake_hands(reader, writer, secret=b"t" * 32)
        writer.write(wire.encode_frame(mark(1)))

        assert await is_closed(reader)
        assert not spot.here.opened and not spot.here.messages
        writer.close()


async def test_a_reflected_proof_is_refused() -> None:
    """The listener's own proof, sent back to it, proves nothing: each side signs under its own name."""
    async with place() as spot:
        reader, writer = await spot.raw()
        writer.write(wire.encode_frame(Hello(wire.PROTOCOL, "dialer", 11, b"n" * 16)))
        welcome = await read_frame(reader)
        assert isinstance(welcome, Welcome)
        writer.write(wire.encode_frame(Proof(welcome.proof)) + wire.encode_frame(mark(1)))

        assert await is_closed(reader)
        assert not spot.here.opened and not spot.here.messages
        writer.close()


@pytest.mark.parametrize("trick", ["recorded", "short nonce", "reflected hello"])
async def test_a_false_listener_is_refused(trick: str) -> None:
    """An old answer, a nonce of the wrong size or the dialer's own frame do not pass for a listener's proof."""
    recorded: list[Welcome] = []
    async with place() as spot:
        reader, writer = await spot.raw()
        recorded.append(await shake_hands(reader, writer))
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await read_frame(reader)
        assert isinstance(hello, Hello)
        answer: Message = recorded[0]
        if trick == "short nonce":
            proof = wire._prove(SECRET, "listening", hello, LISTENER, b"n")
            answer = Welcome(LISTENER.worker_id, LISTENER.incarnation, b"n", proof)
        elif trick == "reflected hello":
            answer = hello
        writer.write(wire.encode_frame(answer) + wire.encode_frame(mark(1)))
        await reader.read()
        writer.close()

    there = Recorder()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    with pytest.raises(WireError, match="does not know the link secret|unexpected Hello"):
        await wire.connect("127.0.0.1", port, DIALER, SECRET, there, liveness=QUICK)
    assert not there.opened and not there.messages
    server.close()


@pytest.mark.parametrize(
    "frame",
    [
        wire.encode_frame(Hello(wire.PROTOCOL + 1, "dialer", 11, b"n" * 16)),
        wire.encode_frame(Hello(wire.PROTOCOL, "dialer", 11, b"short")),
        wire.encode_frame(mark(1)),
        wire.encode_frame(Ping()),
        wire.encode_frame(Proof(b"x" * 32)),
        struct.pack(">I", wire.MAX_HELLO_BYTES + 1),
        wire.encode_frame(Hello(wire.PROTOCOL, "d" * 2000, 11, b"n" * 16)),
        struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack(">I", 0),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["protocol", "nonce", "message", "ping", "proof", "length", "long", "garbage", "empty", "http"],
)
async def test_whatever_is_no_greeting_closes_the_connection(frame: bytes) -> None:
    """A wrong first frame, an oversized one or garbage ends the connection before any handler hears of it."""
    async with place(liveness=wire.Liveness(1.0, 30.0)) as spot:
        reader, writer = await spot.raw()
        writer.write(frame)

        assert await is_closed(reader)
        assert not spot.here.opened and not spot.here.closed and not spot.here.messages
        writer.close()


@pytest.mark.parametrize(
    "data",
    [struct.pack(">I", wire.MAX_FRAME_BYTES + 1), struct.pack(">I", 5) + b"\xc1" * 5],
    ids=["oversized", "garbage"],
)
async def test_a_bad_frame_closes_an_open_connection(data: bytes) -> None:
    """Past the handshake too: the frame before it is delivered, the one behind it is not."""
    async with place() as spot:
        reader, writer = await spot.raw()
        await shake_hands(reader, writer)
        writer.write(wire.encode_frame(mark(1)) + data + wire.encode_frame(mark(2)))

        assert await is_closed(reader)
        await spot.here.until(lambda: spot.here.closed)
        assert spot.here.messages == [mark(1)]
        writer.close()


async def test_another_incarnation_is_refused() -> None:
    """A worker that was restarted behind the same port is not the one that was asked for."""
    there = Recorder()
    async with place() as spot:
        with pytest.raises(WireError, match="not incarnation 21"):
            await spot.dial(there, expect_incarnation=21)
        await spot.here.until(lambda: spot.here.closed)

    assert not there.messages


async def test_a_port_without_listener_is_an_error() -> None:
    """It names the address that could not be reached."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]

        with pytest.raises(WireError, match=f"cannot reach 127.0.0.1:{port}: .+"):
            await wire.connect("127.0.0.1", port, DIALER, SECRET, Recorder())


@pytest.mark.parametrize("end", ["timeout", "cancel"])
async def test_a_dial_that_is_given_up_leaves_no_connection(end: str) -> None:
    """A listener that never answers costs the timeout; nothing of the dial stays, nor if nobody waits any more."""
    said_nothing = asyncio.Event()
    is_ended = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        said_nothing.set()
        await is_closed(reader)
        is_ended.set()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limit_s = 0.1 if end == "timeout" else 30.0
    patient = wire.Liveness(10, 60)
    dial = asyncio.create_task(
        wire.connect("127.0.0.1", port, DIALER, SECRET, Recorder(), timeout_s=limit_s, liveness=patient)
    )
    await said_nothing.wait()
    if end == "cancel":
        dial.cancel()
    (result,) = await asyncio.gather(dial, return_exceptions=True)
    server.close()

    assert isinstance(result, asyncio.CancelledError if end == "cancel" else WireError)
    assert end == "cancel" or str(result) == f"cannot reach 127.0.0.1:{port}: TimeoutError"
    async with asyncio.timeout(1):
        await is_ended.wait()


# --- life and death -------------------------------------------------------------------------------------


async def test_a_killed_peer_is_seen_at_once() -> None:
    """The kernel's FIN or RST ends the connection: no ping has to be missed."""
    clock = asyncio.get_running_loop()
    async with place(liveness=wire.Liveness(10, 60)) as spot:
        peer = await spot.dial(liveness=wire.Liveness(10, 60))
        await spot.here.until(lambda: spot.here.opened)
        assert peer._transport is not None
        began = clock.time()
        peer._transport.abort()
        await spot.here.until(lambda: spot.here.closed)

        assert clock.time() - began < 0.2
        assert not spot.here.opened[0].is_open


async def test_a_silent_peer_is_closed() -> None:
    """A peer that hangs with its socket open is given up after `dead_s`, not before and not much later."""
    clock = asyncio.get_running_loop()
    async with place() as spot:
        reader, writer = await spot.raw()
        began = clock.time()
        await shake_hands(reader, writer)
        await spot.here.until(lambda: spot.here.closed)

        assert QUICK.dead_s <= clock.time() - began < QUICK.dead_s + 0.5
        assert "silent" in spot.here.closed[0].close_reason
        writer.close()


async def test_a_dialer_that_never_speaks_is_closed() -> None:
    """An open socket without a handshake does not stay for ever."""
    async with place(liveness=wire.Liveness(0.05, 0.15)) as spot:
        reader, writer = await spot.raw()

        assert await is_closed(reader)
        assert not spot.here.opened and not spot.here.closed
        writer.close()


async def test_pings_keep_an_idle_connection_open() -> None:
    """Two sides with nothing to say stay connected past `dead_s`, and no handler sees a ping."""
    there = Recorder()
    async with place() as spot:
        peer = await spot.dial(there)
        await asyncio.sleep(2 * QUICK.dead_s)

        assert peer.is_open and spot.here.opened[0].is_open
        assert not there.messages and not spot.here.messages


async def test_a_loop_that_was_held_up_does_not_blame_its_peers() -> None:
    """After a pause longer than `dead_s` of its own, a side first reads and pings before it judges."""
    async with place() as spot:
        peer = await spot.dial()
        await spot.here.until(lambda: spot.here.opened)
        time.sleep(1.5 * QUICK.dead_s)  # noqa: ASYNC251  # the pause is the point
        await asyncio.sleep(0.15)

        assert peer.is_open and spot.here.opened[0].is_open


async def test_ten_thousand_messages_keep_their_order() -> None:
    """Both directions at once: nothing is lost, doubled or swapped."""
    there = Recorder()
    async with place() as spot:
        peer = await spot.dial(there)
        await spot.here.until(lambda: spot.here.opened)
        sent = [mark(seq) for seq in range(10_000)]
        for message in sent:
            peer.send(message)
            spot.here.opened[0].send(message)
        await spot.here.until(lambda: len(spot.here.messages) == 10_000)
        await there.until(lambda: len(there.messages) == 10_000)

    assert spot.here.messages == sent and there.messages == sent


async def test_a_peer_that_does_not_read_is_closed_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What piles up for a stuck peer is bounded; the sender goes on, and further sends do nothing."""
    monkeypatch.setattr(wire, "MAX_UNSENT_BYTES", 100_000)
    async with place(liveness=wire.Liveness(10, 60)) as spot:
        reader, writer = await spot.raw()
        await shake_hands(reader, writer)
        await spot.here.until(lambda: spot.here.opened)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        peer = spot.here.opened[0]
        big = Cancel("x" * 50_000, 1)
        num_sent = 0
        while peer.is_open and num_sent < 1000:
            peer.send(big)
            num_sent += 1
        await spot.here.until(lambda: spot.here.closed)
        peer.send(big)

        assert 2 < num_sent < 1000
        assert peer.close_reason == "peer does not read"
        writer.close()


async def test_messages_from_other_threads_arrive() -> None:
    """`send_threadsafe` may be called anywhere, and keeps the order of one thread."""
    async with place() as spot:
        peer = await spot.dial()
        await asyncio.to_thread(lambda: [peer.send_threadsafe(mark(seq)) for seq in range(50)])
        await spot.here.until(lambda: len(spot.here.messages) == 50)

    assert spot.here.messages == [mark(seq) for seq in range(50)]


async def test_a_closed_connection_says_why_and_takes_nothing_more() -> None:
    """The first reason stays; the handler hears of the end once; sending is no error."""
    there = Recorder()
    async with place() as spot:
        peer = await spot.dial(there)
        peer.close("enough")
        peer.close("again")
        peer.send(mark(1))
        await there.until(lambda: there.closed)
        await spot.here.until(lambda: spot.here.closed)

        assert peer.close_reason == "enough" and not peer.is_open
        assert there.closed == [peer] and not spot.here.messages


async def test_a_handler_that_closes_hears_nothing_of_what_was_behind() -> None:
    """Frames that arrived together with the last straw are not delivered."""

    class Strict(Recorder):
        def on_message(self, peer: wire.Peer, message: Message) -> None:
            super().on_message(peer, message)
            peer.close("no use for it")

    here = Strict()
    listener = await wire.listen("127.0.0.1", 0, LISTENER, SECRET, here, liveness=QUICK)
    reader, writer = await asyncio.open_connection(listener.host, listener.port)
    await shake_hands(reader, writer)
    writer.write(b"".join(wire.encode_frame(mark(seq)) for seq in range(5)))

    assert await is_closed(reader)
    assert here.messages == [mark(0)]
    writer.close()
    listener.close()


def test_the_proof_covers_names_incarnations_and_nonces() -> None:
    """Changing any part of what both sides said changes the proof."""
    hello = Hello(1, "dialer", 11, b"n" * 16)
    base = (SECRET, "listening", hello, LISTENER, b"m" * 16)
    others = [
        (b"t" * 32, *base[1:]),
        (SECRET, "connecting", *base[2:]),
        *(
            (SECRET, "listening", changed, *base[3:])
            for changed in (
                Hello(1, "other", 11, b"n" * 16),
                Hello(1, "dialer", 12, b"n" * 16),
                Hello(1, "dialer", 11, b"o" * 16),
            )
        ),
        (*base[:3], wire.Identity("other", 22), base[4]),
        (*base[:3], wire.Identity("listener", 23), base[4]),
        (*base[:4], b"o" * 16),
    ]

    proofs = {wire._prove(*parts) for parts in [base, *others]}
    assert len(proofs) == 1 + len(others)


def test_commit_and_cancel_are_told_apart_on_the_wire() -> None:
    """Tags, not shapes, decide: a message never decodes as another one with as many fields."""
    frame = wire.encode_frame(Commit("r", 1, 2, 3, 4))

    assert type(msgspec.msgpack.decode(frame[4:], type=Message)) is Commit
