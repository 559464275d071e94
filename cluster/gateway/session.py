"""a request's running choices -> one JSON body, or server-sent events that a broken connection can go on with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from paceline.cluster.gateway import replies, sse
from paceline.cluster.gateway.choices import Choice, Piece
from paceline.cluster.gateway.logprobs import PromptLogprobs, Scored, prompt_logprobs
from paceline.cluster.gateway.resume import Cursor
from paceline.cluster.gateway.schemas import GenerationRequest


@dataclass(frozen=True, slots=True)
class Session:
    """One accepted request on its way to an answer."""

    body: GenerationRequest
    style: replies.Style
    choices: list[Choice]
    num_prompt: int
    answer_id: str
    model: str
    created: int
    """Unix seconds; one for all chunks."""
    pieces: AsyncGenerator[list[Piece], None]
    keepalive_s: float
    cursor: Cursor | None = None
    """Where the client is, if its events have ids."""

    @property
    def num_used(self) -> int:
        """Tokens of prompts and answers so far, as `usage` tells them."""
        return self.num_prompt + sum(choice.num_tokens for choice in self.choices)

    async def whole(self) -> bytes:
        """All text, then one JSON body."""
        texts: dict[int, list[str]] = {choice.index: [] for choice in self.choices}
        scored: dict[int, list[Scored]] = {choice.index: [] for choice in self.choices}
        ids: dict[int, list[int]] = {choice.index: [] for choice in self.choices}
        finishes: dict[int, str] = {}
        async with aclosing(self.pieces) as batches:
            async for batch in batches:
                for piece in batch:
                    texts[piece.choice.index].append(piece.text)
                    scored[piece.choice.index].extend(piece.scored)
                    ids[piece.choice.index].extend(piece.token_ids)
                    if piece.finish is not None:
                        finishes[piece.choice.index] = piece.finish
        whole = []
        for choice in self.choices:
            index = choice.index
            told = self._told_whole(choice, "".join(texts[index]), scored[index], ids[index])
            whole.append(self.style.whole(choice.index, told, finishes[index]))
        make = partial(self._answer(), object=self.style.whole_object, choices=whole)
        if self.style.has_one_prompt:
            make = partial(make, prompt_logprobs=told.prompt, prompt_token_ids=told.prompt_token_ids)
        return msgspec.json.encode(make(usage=self._usage(), metrics=self._metrics()))

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: what each batch of pieces makes, as one write."""
        options = self.body.stream_options
        num_open = len(self.choices)
        opened: set[int] = set()
        counts: dict[int, int] = {}
        no_usage: replies.Usage | UnsetType | None = None if options.include_usage else UNSET
        last_write = time.monotonic()
        if self.cursor is not None and self.cursor.has_all(with_usage=options.include_usage):
            yield sse.DONE
            return
        async with aclosing(self.pieces) as batches:
            async for batch in batches:
                data = b""
                for piece in batch:
                    num_open -= piece.finish is not None
                    counts[piece.choice.index] = piece.num_tokens
                    usage = no_usage
                    if options.continuous_usage_stats:
                        usage = replies.usage(self.num_prompt, sum(counts.values()))
                    data += self._events(piece, opened, usage, is_last=num_open == 0)
                is_quiet = time.monotonic() - last_write > self.keepalive_s  # all of it was there before
                if data or not batch or is_quiet:
                    yield data or sse.KEEPALIVE
                    last_write = time.monotonic()
        if options.include_usage:
            event_id = self.cursor.event_id(is_end=True) if self.cursor else ""
            make = partial(self._answer(), object=self.style.chunk_object, choices=())
            yield sse.frame(make(usage=self._usage(), metrics=self._metrics()), event_id)
        yield sse.DONE

    def _events(
        self, piece: Piece, opened: set[int], usage: replies.Usage | UnsetType | None, *, is_last: bool
    ) -> bytes:
        """The events of a piece, as far as the client does not have them yet."""
        index, cursor = piece.choice.index, self.cursor
        rest = piece if cursor is None else cursor.rest(piece)
        if rest is None:
            return b""
        make = partial(self._answer(), object=self.style.chunk_object, usage=usage)
        data = b""
        if index not in opened:
            opened.add(index)
            opening = self.style.opening(index)
            if opening is not None and not (cursor and cursor.is_open(index)):
                data = sse.frame(make(choices=(opening,)), cursor.opened(index) if cursor else "")
        for chunk in self.style.chunk(index, self._told(rest.text, rest.scored, rest.token_ids), rest.finish):
            is_end = chunk.finish_reason is not None
            has_report = is_end and is_last and not self.body.stream_options.include_usage
            metrics = self._metrics() if has_report else UNSET
            event_id = cursor.told(rest, is_finished=is_end) if cursor else ""
            data += sse.frame(make(choices=(chunk,), metrics=metrics), event_id)
        return data

    def _told(self, text: str, scored: list[Scored], ids: list[int]) -> replies.Told:
        """As far as it was asked for."""
        wants_ids, wants_scores = self.body.return_token_ids, self.body.num_logprobs is not None
        return replies.Told(text, scored if wants_scores else None, token_ids=ids if wants_ids else UNSET)

    def _told_whole(self, choice: Choice, text: str, scored: list[Scored], ids: list[int]) -> replies.Told:
        """With what was asked for of the prompt."""
        told = self._told(text, scored, ids)
        prompt_ids = list(choice.request.prompt_ids) if self.body.return_token_ids else UNSET
        return dataclasses.replace(told, prompt=self._prompt(choice), prompt_token_ids=prompt_ids)

    def _prompt(self, choice: Choice) -> PromptLogprobs | UnsetType:
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return UNSET
        return prompt_logprobs(choice.prompt_scored, self.style.names, num_top)

    def _answer(self) -> partial[replies.Answer]:
        return partial(replies.Answer, id=self.answer_id, created=self.created, model=self.model)

    def _usage(self) -> replies.Usage:
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        return replies.usage(self.num_prompt, num_tokens, [choice.report for choice in self.choices])

    def _metrics(self) -> replies.RequestMetrics:
        return replies.metrics([choice.report for choice in self.choices])
