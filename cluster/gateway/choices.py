"""events of one or several streams -> batches of text pieces, up to stop strings and stop tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from paceline.cluster.gateway.logprobs import Score, Scored, score_prompt, unpack
from paceline.cluster.gateway.problems import StreamFailed
from paceline.cluster.gateway.streams import StreamEvent, StreamReport, Streams
from paceline.cluster.gateway.text import Detokenizer, StopStrings, Tokenizer
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Request


@dataclass(slots=True)
class Piece:
    """New text of one choice; the last piece of a choice has a finish."""

    choice: Choice
    text: str
    num_tokens: int
    """Output tokens of the choice so far."""
    finish: Literal["stop", "length"] | None = None
    scored: list[Scored] = field(default_factory=list)
    """The tokens read for it, if the request asked for log-probabilities; a token that ended the text is not shown."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens read for it, one that ended the text included."""


class Choice:
    """One stream on its way to the client: turns its tokens into text and decides where the text ends.

    Tokens are read one by one, so text and token count do not depend on how they were grouped into events.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        received: float,
        *,
        keep_stop: bool = False,
        echo: str | None = None,
        is_echo_only: bool = False,
    ) -> None:
        """
        Args:
            keep_stop: the stop string that ends the text is part of it.
            echo: put before the text, with the prompt's log-probabilities if the request has any; alone if
                `is_echo_only`.
        """
        self.index = index
        self.request = request
        self.report = StreamReport()
        self.report.timeline.stamps["received"] = received
        self.num_tokens = 0
        self.prompt_scored: list[Scored] = []
        """The prompt's tokens, if the request asked for their log-probabilities."""
        self._tokenizer = tokenizer
        self._echo = echo
        self._is_echo_only = is_echo_only
        self._num_chars = len(echo or "")
        self._scored: list[Scored] = []
        self._token_ids: list[int] = []
        self._stop_ids = frozenset(request.stop_ids)
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops, keep=keep_stop)
        self._finish: Literal["stop", "length"] | None = None
        self._last_event = 0.0

    async def pieces(self, streams: Streams, metrics: Metrics) -> AsyncGenerator[Piece | None, None]:
        """Run the stream. None means: alive, but waiting for a worker.

        Raises:
            StreamFailed: the cluster gave up.
        """
        text = self._echo or ""
        async with _closing(streams.run(self.request, self.report)) as events:
            async for event in events:
                if event.is_waiting:
                    yield None
                    continue
                if event.tokens:
                    self._observe(metrics)
                if self._finish is None:
                    text += self._read(event)
                if self._stops.is_matched and event.finish is None:
                    break  # leaving the block closes the iterator: the cluster stops working on it
                if self._finish is None and event.tokens:
                    yield self._piece(text)
                    text = ""
        if self._finish is None:
            raise StreamFailed("the stream ended before it was finished")
        self.report.timeline.stamp("done")
        yield self._piece(text)

    def _read(self, event: StreamEvent) -> str:
        """The text that an event makes certain; sets the finish where the text ends."""
        if event.finish == "error":
            raise StreamFailed(event.error or "the stream failed")
        self._read_prompt(event)
        if self._is_echo_only and event.tokens:
            return self._end("length")
        scores = self._scores(event)
        text = ""
        for at, token in enumerate(event.tokens):
            if self._finish is not None:
                return text
            self.num_tokens += 1
            self._token_ids.append(token)
            if token in self._stop_ids:
                return text + self._end("stop")
            if scores is not None:
                self._scored.append(Scored(token, self._num_chars, scores[at]))
            piece = self._detokenizer.feed(token)
            self._num_chars += len(piece)
            # Before the minimum a stop string does not count, like a stop token.
            is_free = self.num_tokens <= self.request.sampling.min_tokens
            text += piece if is_free else self._stops.feed(piece)
            if self._stops.is_matched:
                self._finish = "stop"
        if event.finish is not None and self._finish is None:
            text += self._end("stop" if event.finish == "stop" else "length")
        return text

    def _scores(self, event: StreamEvent) -> list[Score] | None:
        if self.request.logprobs is None or not event.tokens:
            return None
        if event.logprobs is None:
            raise StreamFailed("the tokens came without the log-probabilities that were asked for")
        return unpack(event.logprobs)

    def _read_prompt(self, event: StreamEvent) -> None:
        """The prompt's log-probabilities come with the first tokens; after a recovery they come again."""
        if event.prompt_logprobs is None or self.prompt_scored:
            return
        ids, num_chars = self.request.prompt_ids, len(self._echo or "")
        self.prompt_scored = score_prompt(ids, event.prompt_logprobs, self._tokenizer, num_chars)
        if self._echo is not None and self.request.logprobs is not None:
            self._scored.extend(self.prompt_scored)

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        """Why its text ended; None while it has not, and where it failed."""
        return self._finish

    def _piece(self, text: str) -> Piece:
        piece = Piece(self, text, self.num_tokens, self._finish, self._scored, self._token_ids)
        self._scored, self._token_ids = [], []
        return piece

    @property
    def num_scored_prompt(self) -> int:
        """Tokens of the prompt among the scored ones of the pieces."""
        return len(self.prompt_scored) if self._echo is not None and self.request.logprobs is not None else 0

    def _end(self, finish: Literal["stop", "length"]) -> str:
        """What was held back. A stop string in it counts: the text reads the same wherever the stream ended."""
        rest = self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
        self._finish = "stop" if self._stops.is_matched else finish
        return rest

    def _observe(self, metrics: Metrics) -> None:
        now = time.monotonic()
        stamps = self.report.timeline.stamps
        if "first_token" not in stamps:
            stamps["first_token"] = now
            metrics.ttft.observe(now - stamps["received"])
        else:
            metrics.inter_token.observe(now - self._last_event)
        self._last_event = now


@asynccontextmanager
async def _closing(events: AsyncIterator[StreamEvent]) -> AsyncIterator[AsyncIterator[StreamEvent]]:
    """Close an iterator that can be closed, whatever happens."""
    try:
        yield events
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


@dataclass(slots=True)
class _Mailbox:
    """Where all choices of a request put what they have; an exception ends the request."""

    queue: asyncio.Queue[Piece | Exception | None] = field(default_factory=asyncio.Queue)
    last_take: float = field(default_factory=time.monotonic)

    async def fill(self, choice: Choice, streams: Streams, metrics: Metrics) -> None:
        try:
            async with aclosing(choice.pieces(streams, metrics)) as pieces:
                async for piece in pieces:
                    self.queue.put_nowait(piece)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request has to hear of it
            self.queue.put_nowait(error)

    async def tick(self, keepalive_s: float) -> None:
        """A None whenever nothing was taken for `keepalive_s`."""
        while True:
            quiet = time.monotonic() - self.last_take
            if quiet >= keepalive_s:
                self.queue.put_nowait(None)
                quiet = 0.0
            await asyncio.sleep(keepalive_s - quiet)

    async def take(self) -> list[Piece]:
        """Wait for something, then take all there is; nothing but Nones gives an empty list."""
        items = [await self.queue.get()]
        while not self.queue.empty():
            items.append(self.queue.get_nowait())
        self.last_take = time.monotonic()
        pieces: list[Piece] = []
        for item in items:
            if isinstance(item, Piece):
                pieces.append(item)
            elif item is not None and not pieces:
                raise item
            elif item is not None:
                self.queue.put_nowait(item)  # first what came before it
        return pieces


async def run_choices(
    choices: Sequence[Choice], streams: Streams, metrics: Metrics, *, keepalive_s: float
) -> AsyncGenerator[list[Piece], None]:
    """Run all choices at once and give their pieces as they come; an empty list is a sign of life.

    Closing this generator closes every stream. The first error does too, and is raised.
    """
    mailbox = _Mailbox()
    tasks = [asyncio.create_task(mailbox.fill(choice, streams, metrics)) for choice in choices]
    tasks.append(asyncio.create_task(mailbox.tick(keepalive_s)))
    num_open = len(choices)
    try:
        while num_open:
            pieces = await mailbox.take()
            num_open -= sum(piece.finish is not None for piece in pieces)
            yield pieces
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
