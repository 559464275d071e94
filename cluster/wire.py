"""Typed messages <-> frames on one long-lived, mutually authenticated TCP connection per pair of processes.

A frame is a 4-byte big-endian length and one msgpack message (`paceline.cluster.types.Message`, decoded against
its type, never pickle). Both sides prove that they know the link secret before the first message:

    connecting -> listening   Hello(protocol, who, incarnation, nonce_c)
    listening  -> connecting  Welcome(who, incarnation, nonce_l, HMAC(secret, "listening", nonces, names))
    connecting -> listening   Proof(HMAC(secret, "connecting", nonces, names))

asyncio streams were taken over ZeroMQ because a killed peer must be seen at once: the kernel's FIN or RST closes
the connection, where ZeroMQ hides it behind its reconnects. A peer that hangs is seen by its missing pings.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec

from paceline.cluster.errors import WireError
from paceline.cluster.types import Hello, Message, Ping, Proof, Welcome

PROTOCOL = 1
MAX_FRAME_BYTES = 32 << 20
MAX_UNSENT_BYTES = 64 << 20
"""A peer that reads so slowly that this much piles up is treated as dead."""
MAX_HELLO_BYTES = 1024

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is to its peers."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Liveness:
    """How a silent peer is told from a slow one."""

    ping_s: float = 1.0
    dead_s: float = 4.0


class Handler(Protocol):
    """What a part must offer to use connections. All calls come on the event loop's thread."""

    def on_open(self, peer: Peer) -> None: ...
    def on_message(self, peer: Peer, message: Message) -> None: ...
    def on_close(self, peer: Peer) -> None: ...


def encode_frame(message: Message) -> bytes:
    """One message as length and msgpack."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}"
        )
    return _LENGTH.pack(len(body)) + body


def _prove(secret: bytes, side: str, hello: Hello, welcome_id: Identity, nonce_l: bytes) -> bytes:
    parts = (side, hello.worker_id, str(hello.incarnation), welcome_id.worker_id, str(welcome_id.incarnation))
    text = "\0".join(parts).encode() + hello.nonce + nonce_l
    return hmac.digest(secret, text, hashlib.sha256)


class Peer(asyncio.Protocol):
    """One connection. `identity` is the other side's, known once the handshake is done."""

    def __init__(
        self, me: Identity, secret: bytes, handler: Handler, *, connecting: bool, liveness: Liveness
    ) -> None:
        self._me = me
        self._secret = secret
        self._handler = handler
        self._connecting = connecting
        self._liveness = liveness
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._hello: Hello | None = None
        self._nonce = os.urandom(16)
        self._loop = asyncio.get_running_loop()
        self._last_received = self._loop.time()
        self._last_sent = self._began = self._last_received
        self._timer: asyncio.TimerHandle | None = None
        self.identity: Identity | None = None
        self.session_key = b""
        """32 bytes that only the two ends of this connection know: fresh for each, and never sent."""
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.close_reason = ""

    # -- use ---------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True between the handshake and the close."""
        return self.ready.done() and self._transport is not None and not self._transport.is_closing()

    def send(self, message: Message) -> None:
        """Queue one message (event loop thread only). Does nothing on a closed connection."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(encode_frame(message))
        self._last_sent = self._loop.time()
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close("peer does not read")

    def send_threadsafe(self, message: Message) -> None:
        """`send` from any thread."""
        try:
            self._loop.call_soon_threadsafe(self.send, message)
        except RuntimeError:  # the loop is closed: the process is on its way out
            return

    def close(self, reason: str = "closed here") -> None:
        """Drop the connection now; unsent bytes are lost."""
        self.close_reason = self.close_reason or reason
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        if self._connecting:
            self._hello = Hello(PROTOCOL, self._me.worker_id, self._me.incarnation, self._nonce)
            self.send(self._hello)
        self._timer = self._loop.call_later(self._liveness.ping_s, self._check_liveness)

    def data_received(self, data: bytes) -> None:
        self._last_received = self._loop.time()
        self._buffer += data
        view = self._buffer
        at = 0
        while len(view) - at >= 4:
            (length,) = _LENGTH.unpack_from(view, at)
            if length > (MAX_FRAME_BYTES if self.identity else MAX_HELLO_BYTES):
                self.close(f"frame of {length} bytes is over the limit")
                return
            if len(view) - at - 4 < length:
                break
            body = bytes(view[at + 4 : at + 4 + length])
            at += 4 + length
            try:
                message = _decoder.decode(body)
            except msgspec.DecodeError as error:
                self.close(f"not a message: {error}")
                return
            self._received(message)
            if self._transport is None or self._transport.is_closing():
                return
        del self._buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.close_reason = self.close_reason or (str(exc) if exc else "peer closed")
        self._transport = None
        if not self.ready.done():
            self.ready.set_exception(WireError(f"connection failed: {self.close_reason}"))
            self.ready.exception()  # a listener has nobody to await it
        elif self.identity is not None:
            self._handler.on_close(self)

    # -- handshake ---------------------------------------------------------------------------------------

    def _received(self, message: Message) -> None:
        if self.ready.done():
            if not isinstance(message, Ping):
                self._handler.on_message(self, message)
        elif self._connecting and isinstance(message, Welcome):
            self._finish_connecting(message)
        elif not self._connecting and isinstance(message, Hello) and self._hello is None:
            self._answer_hello(message)
        elif not self._connecting and isinstance(message, Proof) and self._hello is not None:
            self._finish_listening(message)
        else:
            self.close(f"unexpected {type(message).__name__} in the handshake")

    def _answer_hello(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL or len(hello.nonce) != 16:
            self.close(f"peer speaks protocol {hello.protocol}, this side {PROTOCOL}")
            return
        self._hello = hello
        proof = _prove(self._secret, "listening", hello, self._me, self._nonce)
        self.send(Welcome(self._me.worker_id, self._me.incarnation, self._nonce, proof))

    def _finish_connecting(self, welcome: Welcome) -> None:
        assert self._hello is not None
        them = Identity(welcome.worker_id, welcome.incarnation)
        expected = _prove(self._secret, "listening", self._hello, them, welcome.nonce)
        if len(welcome.nonce) != 16 or not hmac.compare_digest(expected, welcome.proof):
            self.close("the listening side does not know the link secret")
            return
        self.send(Proof(_prove(self._secret, "connecting", self._hello, them, welcome.nonce)))
        self.session_key = _prove(self._secret, "session", self._hello, them, welcome.nonce)
        self._open(them)

    def _finish_listening(self, proof: Proof) -> None:
        assert self._hello is not None
        expected = _prove(self._secret, "connecting", self._hello, self._me, self._nonce)
        if not hmac.compare_digest(expected, proof.proof):
            self.close("the connecting side does not know the link secret")
            return
        self.session_key = _prove(self._secret, "session", self._hello, self._me, self._nonce)
        self._open(Identity(self._hello.worker_id, self._hello.incarnation))

    def _open(self, identity: Identity) -> None:
        self.identity = identity
        self.ready.set_result(None)
        self._handler.on_open(self)

    def _check_liveness(self) -> None:
        now = self._loop.time()
        assert self._timer is not None
        # A loop that was itself held up must first read what has arrived meanwhile: the time this was due counts.
        if self._timer.when() - self._last_received > self._liveness.dead_s:
            self.close(f"silent for {now - self._last_received:.1f} s")
            return
        if self.identity is None and now - self._began > self._liveness.dead_s:
            self.close("the handshake took too long")
            return
        if self.identity is not None and now - self._last_sent >= self._liveness.ping_s:
            self.send(Ping())
        self._timer = self._loop.call_later(self._liveness.ping_s, self._check_liveness)


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket. `port` is the real one when 0 was asked for."""

    server: asyncio.Server
    host: str
    port: int

    def close(self) -> None:
        """Accept nothing more; open connections stay."""
        self.server.close()


async def listen(
    host: str, port: int, me: Identity, secret: bytes, handler: Handler, *, liveness: Liveness | None = None
) -> Listener:
    """Accept authenticated peers on `host`:`port` (one interface, never all of them)."""
    limits = liveness or Liveness()
    server = await asyncio.get_running_loop().create_server(
        lambda: Peer(me, secret, handler, connecting=False, liveness=limits), host, port
    )
    return Listener(server, host, server.sockets[0].getsockname()[1])


async def connect(
    host: str,
    port: int,
    me: Identity,
    secret: bytes,
    handler: Handler,
    *,
    expect_incarnation: int | None = None,
    timeout_s: float = 3.0,
    liveness: Liveness | None = None,
) -> Peer:
    """Open one authenticated connection.

    Raises:
        WireError: nobody listens, the peer failed to prove itself, or another incarnation answered.
    """
    limits = liveness or Liveness()
    peer: Peer | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, peer = await asyncio.get_running_loop().create_connection(
                lambda: Peer(me, secret, handler, connecting=True, liveness=limits), host, port
            )
            await asyncio.shield(peer.ready)
    except asyncio.CancelledError:
        if peer is not None:
            peer.close("nobody waits for it")
        raise
    except (OSError, TimeoutError) as error:
        if peer is not None:
            peer.close("handshake timed out")
        raise WireError(f"cannot reach {host}:{port}: {str(error) or type(error).__name__}") from error
    assert peer.identity is not None
    if expect_incarnation is not None and peer.identity.incarnation != expect_incarnation:
        peer.close("another incarnation")
        raise WireError(f"{host}:{port} is now {peer.identity}, not incarnation {expect_incarnation}")
    return peer
