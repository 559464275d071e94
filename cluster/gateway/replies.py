"""finished and running choices -> the JSON of OpenAI's answers: whole, or chunk by chunk.

Plain structs, not validated: they are made once a token, from values of our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from paceline.cluster.gateway.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    Scored,
    TextLogprobs,
    TokenNames,
    chat_logprobs,
    text_logprobs,
)
from paceline.cluster.gateway.streams import StreamReport
from paceline.cluster.types import SOURCE_NAMES


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all; an UNSET field is left out of the JSON."""


class TokenDetails(Reply, frozen=True, kw_only=True):
    """What became of the drafted tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Reply, frozen=True, kw_only=True):
    """Tokens of one request. A prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: TokenDetails | UnsetType = UNSET


class Speculation(Reply, frozen=True, kw_only=True):
    """How drafting went, over all choices; names and meanings are vLLM's, which benchmarks read."""

    num_spec_steps: int
    """Steps in which something was drafted."""
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float
    mean_acceptance_length: float
    """Tokens that such a step yields: those it accepts, and one of the target."""
    acceptance_histogram: list[int]
    """Steps that accepted 0, 1, 2, ... drafted tokens."""


class RequestMetrics(Reply, frozen=True, kw_only=True):
    """What served a request. With one choice worker fields are a name, with several a list in choice order."""

    speculative_decoding: Speculation
    num_steps: int
    """All steps of the target that yielded its tokens."""
    prefill_worker: str | list[str]
    decode_worker: str | list[str]
    decode_workers: list[str]
    draft_worker: str | list[str]
    draft_version: str | list[str]
    kv_source: list[str]
    kv_bytes: int
    tokens_by_source: dict[str, int]
    recoveries: int
    ttft_ms: float | None
    total_ms: float | None


class AssistantMessage(Reply, frozen=True, kw_only=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatDelta(Reply, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Reply, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Reply, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(Reply, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Answer(Reply, frozen=True, kw_only=True):
    """The envelope that all four kinds of answers share."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChoice | ChatChunkChoice | TextChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Of a chat, whose choices have one prompt."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """The same."""


class Model(Reply, frozen=True, kw_only=True):
    id: str
    created: int
    max_model_len: int
    quantization: Literal["int8"] | UnsetType = UNSET
    """The weights were rounded: `model.int8_weights`."""
    object: str = "model"
    owned_by: str = "paceline"


class ModelList(Reply, frozen=True, kw_only=True):
    data: list[Model]
    object: str = "list"


@dataclass(frozen=True, slots=True)
class Told:
    """What a choice says, or a chunk of it: its text, and what was asked for besides."""

    text: str
    scored: Sequence[Scored] | None = None
    prompt: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.scored or self.token_ids)


class Style(Protocol):
    """What differs between chat and plain completions."""

    @property
    def names(self) -> TokenNames:
        """How tokens are spelled."""
        ...

    @property
    def prefix(self) -> str:
        """Of the answer's id."""
        ...

    @property
    def whole_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    def opening(self, index: int) -> ChatChunkChoice | TextChoice | None:
        """The chunk before a choice's first text, if there is one."""
        ...

    def chunk(self, index: int, told: Told, finish: str | None) -> list[ChatChunkChoice | TextChoice]:
        """Chunks for new text and for the end of a choice."""
        ...

    def whole(self, index: int, told: Told, finish: str) -> ChatChoice | TextChoice: ...

    @property
    def has_one_prompt(self) -> bool:
        """What is said of the prompt stands in the answer, rather than in each of its choices."""
        ...


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """A role chunk, content chunks, a chunk with the finish reason only."""

    names: TokenNames
    num_top: int = 0
    """Alternatives shown with a token."""
    prefix: str = "chatcmpl-"
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    has_one_prompt: bool = True

    def opening(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    def chunk(self, index: int, told: Told, finish: str | None) -> list[ChatChunkChoice | TextChoice]:
        chunks: list[ChatChunkChoice | TextChoice] = []
        if not told.is_empty:
            delta = ChatDelta(content=told.text)
            logprobs = self._logprobs(told) if told.scored else None
            ids = told.token_ids
            chunks.append(ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, token_ids=ids))
        if finish is not None:
            chunks.append(ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=finish))
        return chunks

    def whole(self, index: int, told: Told, finish: str) -> ChatChoice:
        message, logprobs = AssistantMessage(content=told.text), self._logprobs(told)
        return ChatChoice(
            index=index, message=message, logprobs=logprobs, finish_reason=finish, token_ids=told.token_ids
        )

    def _logprobs(self, told: Told) -> ChatLogprobs | None:
        return None if told.scored is None else chat_logprobs(told.scored, self.names, self.num_top)


@dataclass(frozen=True, slots=True)
class TextStyle:
    """Text chunks, the last with the finish reason."""

    names: TokenNames
    num_top: int = 0
    """Alternatives shown with a token."""
    prefix: str = "cmpl-"
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"
    has_one_prompt: bool = False

    def opening(self, index: int) -> None:
        return None

    def chunk(self, index: int, told: Told, finish: str | None) -> list[ChatChunkChoice | TextChoice]:
        if told.is_empty and finish is None:
            return []
        logprobs = self._logprobs(told) if told.scored else None
        choice = TextChoice(
            index=index,
            text=told.text,
            logprobs=logprobs,
            finish_reason=finish,
            token_ids=told.token_ids,
            prompt_token_ids=told.prompt_token_ids,
        )
        return [choice]

    def whole(self, index: int, told: Told, finish: str) -> TextChoice:
        return TextChoice(
            index=index,
            text=told.text,
            logprobs=self._logprobs(told),
            finish_reason=finish,
            prompt_logprobs=told.prompt,
            token_ids=told.token_ids,
            prompt_token_ids=told.prompt_token_ids,
        )

    def _logprobs(self, told: Told) -> TextLogprobs | None:
        return None if told.scored is None else text_logprobs(told.scored, self.names, self.num_top)


def usage(num_prompt: int, num_completion: int, reports: Sequence[StreamReport] = ()) -> Usage:
    """Token counts; with the reports of all choices also what became of drafted tokens."""
    details: TokenDetails | UnsetType = UNSET
    if reports:
        accepted = sum(report.num_accepted for report in reports)
        rejected = sum(report.num_drafted for report in reports) - accepted
        details = TokenDetails(accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        completion_tokens_details=details,
    )


def metrics(reports: Sequence[StreamReport]) -> RequestMetrics:
    """Sums and lists over the choices of one request."""
    by_source = {
        name: sum(report.tokens_by_source.get(name, 0) for report in reports) for name in SOURCE_NAMES
    }
    return RequestMetrics(
        speculative_decoding=_speculation(reports),
        num_steps=sum(report.num_steps for report in reports),
        prefill_worker=_one_or_all([report.prefill_worker for report in reports]),
        decode_worker=_one_or_all([(report.decode_workers or [""])[-1] for report in reports]),
        decode_workers=[name for report in reports for name in report.decode_workers],
        draft_worker=_one_or_all([report.draft_worker for report in reports]),
        draft_version=_one_or_all([report.draft_version for report in reports]),
        kv_source=[source for report in reports for source in report.kv_sources],
        kv_bytes=sum(report.kv_bytes for report in reports),
        tokens_by_source=by_source,
        recoveries=sum(report.num_recoveries for report in reports),
        ttft_ms=min(_milliseconds(reports, "first_token"), default=None),
        total_ms=max(_milliseconds(reports, "done"), default=None),
    )


def _speculation(reports: Sequence[StreamReport]) -> Speculation:
    most = max((num for report in reports for num in report.accepted_steps), default=0)
    histogram = [sum(report.accepted_steps.get(num, 0) for report in reports) for num in range(most + 1)]
    steps, drafted = sum(histogram), sum(report.num_drafted for report in reports)
    accepted = sum(report.num_accepted for report in reports)
    return Speculation(
        num_spec_steps=steps,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        mean_acceptance_length=1 + accepted / steps if steps else 1.0,
        acceptance_histogram=histogram,
    )


def _one_or_all(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


def _milliseconds(reports: Sequence[StreamReport], end: str) -> list[float]:
    found = (report.timeline.seconds("received", end) for report in reports)
    return [round(seconds * 1000, 3) for seconds in found if seconds is not None]
