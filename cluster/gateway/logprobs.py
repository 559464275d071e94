"""Tokens with their log-probabilities -> the logprobs objects of OpenAI's two APIs, and vLLM's for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.types import Logprobs

_LEAST = -9999.0
"""What JSON has instead of minus infinity, as with vLLM."""


@dataclass(frozen=True, slots=True)
class Score:
    """What the model thought of one token. `top`: the most probable tokens of its position, best first."""

    logprob: float
    rank: int
    """1 for the most probable."""
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the answer. Only the first token of a prompt has no score."""

    token_id: int
    offset: int
    """Characters of the answer's text before it."""
    score: Score | None


def unpack(found: Logprobs) -> list[Score]:
    """One score a token."""
    own = np.frombuffer(found.own, "<f4").astype(float)
    ranks = np.frombuffer(found.ranks, "<i4")
    ids = np.frombuffer(found.top_ids, "<i4").reshape(len(own), found.num_top)
    top = np.frombuffer(found.top, "<f4").astype(float).reshape(len(own), found.num_top)
    return [
        Score(max(value, _LEAST), rank, tuple(zip(row_ids, (max(z, _LEAST) for z in row), strict=True)))
        for value, rank, row_ids, row in zip(
            own.tolist(), ranks.tolist(), ids.tolist(), top.tolist(), strict=True
        )
    ]


def score_prompt(ids: Sequence[int], found: Logprobs, tokenizer: Tokenizer, num_chars: int) -> list[Scored]:
    """A prompt's tokens; `num_chars` is the length of its text, which no offset exceeds."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    scored: list[Scored] = []
    offset = 0
    scores: list[Score | None] = [None, *unpack(found)]
    for token, score in zip(ids, scores, strict=True):
        scored.append(Scored(token, min(offset, num_chars), score))
        if token not in tokenizer.hidden_ids:
            offset += len(decoder.decode(tokenizer.token_bytes(token)))
    return scored


class TokenNames:
    """Token ids as answers spell them; remembered, because frequent tokens come again and again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, list[int]]:
        """Text and UTF-8 bytes. A token that is only a part of a character is spelled `bytes:\\xf0\\x9f`."""
        name = self._known.get(token_id)
        if name is None:
            data = self._tokenizer.token_bytes(token_id)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            name = self._known[token_id] = text, list(data)
        return name


# --- the JSON -------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most probable tokens of a position, in a chat."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """Four lists, aligned. The first token of an echoed prompt has null for what it cannot have."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate for a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By position: candidates by token id, the prompt's own token first. The first position has none."""


def chat_logprobs(scored: Sequence[Scored], names: TokenNames, num_top: int) -> ChatLogprobs:
    """Of the tokens of one chunk, or of all."""
    content = []
    for token in scored:
        assert token.score is not None, "a chat does not show its prompt"
        top = [TopLogprob(names[id][0], value, names[id][1]) for id, value in token.score.top[:num_top]]
        text, data = names[token.token_id]
        content.append(TokenLogprob(text, token.score.logprob, data, top))
    return ChatLogprobs(content)


def text_logprobs(scored: Sequence[Scored], names: TokenNames, num_top: int) -> TextLogprobs:
    """Of the tokens of one chunk, or of all; the token itself is always among its alternatives."""
    tops: list[dict[str, float] | None] = []
    for token in scored:
        if token.score is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for id, value in (*token.score.top[:num_top], (token.token_id, token.score.logprob)):
            top.setdefault(names[id][0], value)  # of tokens spelled alike the most probable is shown
        tops.append(top)
    return TextLogprobs(
        [names[token.token_id][0] for token in scored],
        [None if token.score is None else token.score.logprob for token in scored],
        tops,
        [token.offset for token in scored],
    )


def prompt_logprobs(scored: Sequence[Scored], names: TokenNames, num_top: int) -> PromptLogprobs:
    """Of all tokens of a prompt."""
    found: PromptLogprobs = []
    for token in scored:
        if token.score is None:
            found.append(None)
            continue
        own = PromptLogprob(token.score.logprob, token.score.rank, names[token.token_id][0])
        candidates = {str(token.token_id): own}
        for rank, (id, value) in enumerate(token.score.top[:num_top], start=1):
            candidates.setdefault(str(id), PromptLogprob(value, rank, names[id][0]))
        found.append(candidates)
    return found
