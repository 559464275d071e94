"""HTTP request -> one stream for each prompt and choice -> JSON, or server-sent events; always in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from paceline.cluster.config import ClusterConfig
from paceline.cluster.errors import PacelineError, RequestError, Unavailable
from paceline.cluster.gateway import replies, sse
from paceline.cluster.gateway.choices import Choice, Piece, run_choices
from paceline.cluster.gateway.envelope import Envelope
from paceline.cluster.gateway.logprobs import PromptLogprobs, Scored, TokenNames, prompt_logprobs
from paceline.cluster.gateway.problems import problem_of
from paceline.cluster.gateway.schemas import ChatRequest, CompletionRequest, GenerationRequest, Prompt, parse
from paceline.cluster.gateway.streams import Streams
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Request as StreamRequest

_INLINE_BYTES = 4096
"""Bodies up to this size are read and tokenised on the event loop: it takes less than a thread's round trip."""
_MAX_PROMPT_SCORES = 1 << 18
"""Candidates in the log-probabilities of one prompt: they are read on the event loop, a microsecond each."""
_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was found good: its streams can start."""

    body: GenerationRequest
    prompts: list[list[int]]
    limits: list[int]
    """Output tokens for each prompt."""
    echoes: list[str] | None = None
    """Text to put before each prompt's answers."""


@dataclass(frozen=True, slots=True)
class Session:
    """One accepted request on its way to an answer."""

    body: GenerationRequest
    style: replies.Style
    choices: list[Choice]
    num_prompt: int
    answer_id: str
    model: str
    pieces: AsyncGenerator[list[Piece], None]

    async def whole(self) -> bytes:
        """All text, then one JSON body."""
        texts: dict[int, list[str]] = {choice.index: [] for choice in self.choices}
        scored: dict[int, list[Scored]] = {choice.index: [] for choice in self.choices}
        finishes: dict[int, str] = {}
        async with aclosing(self.pieces) as batches:
            async for batch in batches:
                for piece in batch:
                    texts[piece.choice.index].append(piece.text)
                    scored[piece.choice.index].extend(piece.scored)
                    if piece.finish is not None:
                        finishes[piece.choice.index] = piece.finish
        whole = []
        for choice in self.choices:
            tokens = None if self.body.num_logprobs is None else scored[choice.index]
            told = replies.Told("".join(texts[choice.index]), tokens, self._prompt(choice))
            whole.append(self.style.whole(choice.index, told, finishes[choice.index]))
        make = partial(self._answer(), object=self.style.whole_object, choices=whole)
        prompt = self.style.prompt(self._prompt(self.choices[0]))
        return msgspec.json.encode(make(usage=self._usage(), metrics=self._metrics(), prompt_logprobs=prompt))

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: what each batch of pieces makes, as one write."""
        options = self.body.stream_options
        make = partial(self._answer(), object=self.style.chunk_object)
        num_open = len(self.choices)
        opened: set[int] = set()
        counts: dict[int, int] = {}
        no_usage: replies.Usage | msgspec.UnsetType | None = None if options.include_usage else msgspec.UNSET
        async with aclosing(self.pieces) as batches:
            async for batch in batches:
                data = b""
                for piece in batch:
                    num_open -= piece.finish is not None
                    counts[piece.choice.index] = piece.num_tokens
                    count = no_usage
                    if options.continuous_usage_stats:
                        count = replies.usage(self.num_prompt, sum(counts.values()))
                    for choice in self._chunks(piece, opened):
                        is_last = num_open == 0 and choice.finish_reason is not None
                        report = self._metrics() if is_last and not options.include_usage else msgspec.UNSET
                        data += sse.frame(make(choices=(choice,), usage=count, metrics=report))
                if data or not batch:
                    yield data or sse.KEEPALIVE
        if options.include_usage:
            yield sse.frame(make(choices=(), usage=self._usage(), metrics=self._metrics()))
        yield sse.DONE

    def _chunks(self, piece: Piece, opened: set[int]) -> list[replies.ChatChunkChoice | replies.TextChoice]:
        index = piece.choice.index
        told = replies.Told(piece.text, None if self.body.num_logprobs is None else piece.scored)
        chunks = self.style.chunk(index, told, piece.finish)
        if index not in opened:
            opened.add(index)
            opening = self.style.opening(index)
            if opening is not None:
                return [opening, *chunks]
        return chunks

    def _prompt(self, choice: Choice) -> PromptLogprobs | msgspec.UnsetType:
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return msgspec.UNSET
        return prompt_logprobs(choice.prompt_scored, self.style.names, num_top)

    def _answer(self) -> partial[replies.Answer]:
        return partial(replies.Answer, id=self.answer_id, created=int(time.time()), model=self.model)

    def _usage(self) -> replies.Usage:
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        return replies.usage(self.num_prompt, num_tokens, [choice.report for choice in self.choices])

    def _metrics(self) -> replies.RequestMetrics:
        return replies.metrics([choice.report for choice in self.choices])


class Ingress:
    """The routes' work: check, tokenise, start streams, answer."""

    def __init__(
        self,
        config: ClusterConfig,
        streams: Streams,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        max_context: int,
    ) -> None:
        self._config = config
        self._streams = streams
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer)
        self._metrics = metrics
        self._max_context = max_context
        self._model = replies.Model(id=config.model.name, created=int(time.time()), max_model_len=max_context)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, self._prepare_chat, replies.ChatStyle)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, self._prepare_completion, replies.TextStyle)

    async def models(self) -> Response:
        return _json(replies.ModelList(data=[self._model]))

    async def model(self, model_id: str) -> Response:
        self._check_model(model_id)
        return _json(self._model)

    async def health(self) -> dict[str, str]:
        """The gateway itself lives."""
        return {"status": "ok"}

    async def ready(self) -> dict[str, str]:
        """Requests can be served now."""
        if not self._streams.is_ready:
            raise Unavailable("no worker is ready to generate")
        return {"status": "ready"}

    async def _generate(
        self,
        request: Request,
        prepare: Callable[[bytes], Prepared],
        style: Callable[[TokenNames, int], replies.Style],
    ) -> Response:
        data = await request.body()
        prepared: Prepared
        if len(data) > _INLINE_BYTES:
            prepared = await asyncio.to_thread(prepare, data)
        else:
            prepared = prepare(data)
        body = prepared.body
        seed = body.chosen_seed()
        dressed = style(self._names, body.num_logprobs or 0)
        session = self._start(prepared, dressed, seed, request.state.request_id, request.state.received)
        headers = {"x-paceline-seed": str(seed)}
        if body.stream:
            return sse.EventStream(session.frames(), headers)
        answer = await sse.until_disconnect(request.receive, session.whole())
        return Response(answer, headers=headers, media_type="application/json")

    # --- checks and tokens: may run in a thread

    def _prepare_chat(self, data: bytes) -> Prepared:
        body = parse(ChatRequest, data)
        self._check_model(body.model)
        messages = [message.flat() for message in body.messages]
        self._check_len(sum(len(message["content"]) for message in messages), "messages")
        ids = self._tokenizer.encode_chat(messages)
        return self._fit(body, [ids], self._config.limits.default_max_tokens, "messages")

    def _prepare_completion(self, data: bytes) -> Prepared:
        body = parse(CompletionRequest, data)
        self._check_model(body.model)
        prompts = [self._prompt_ids(prompt) for prompt in body.prompt]
        prepared = self._fit(body, prompts, _COMPLETION_MAX_TOKENS, "prompt")
        if not body.echo:
            return prepared
        # Text comes back as it was sent, ids as the text they stand for.
        echoes = [p if isinstance(p, str) else self._tokenizer.decode(p) for p in body.prompt]
        return dataclasses.replace(prepared, echoes=echoes)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            self._check_len(len(prompt), "prompt")
            ids = self._tokenizer.encode(prompt)
        else:
            self._check_ids(prompt, "prompt")
            ids = prompt
        if ids:
            return ids
        if self._tokenizer.bos_id is None:
            raise RequestError(
                "prompt: empty, and this model has no token that begins a text", param="prompt"
            )
        return [self._tokenizer.bos_id]

    def _check_model(self, name: str) -> None:
        """None given means the one there is."""
        if name and name != self._model.id:
            message = f"model {name[:80]!r} does not exist here; served: {self._model.id}"
            raise RequestError(message, param="model", code="model_not_found", status=404)

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        highest = max(ids, default=0)
        if highest >= self._tokenizer.vocab_size:
            message = f"{field}: token id {highest}: expected 0..{self._tokenizer.vocab_size - 1}"
            raise RequestError(message, param=field)

    def _check_len(self, num_chars: int, field: str) -> None:
        """A text this long cannot fit, so it is not tokenised at all."""
        if num_chars > self._max_context * self._tokenizer.max_token_len:
            raise self._too_long(f"{field}: {num_chars} characters are more than", field)

    def _too_long(self, complaint: str, field: str) -> RequestError:
        message = f"{complaint} the {self._max_context} tokens of context that prompt and output share"
        return RequestError(message, param=field, code="context_length_exceeded")

    def _fit(self, body: GenerationRequest, prompts: list[list[int]], default: int, field: str) -> Prepared:
        """Every prompt with its output has to fit; an output length nobody asked for is cut to what does."""
        self._check_ids(body.stop_token_ids, "stop_token_ids")
        self._check_ids([token for token, _ in body.biases], "logit_bias")
        limits = []
        for ids in prompts:
            room = self._max_context - len(ids)
            if room < 1:
                raise self._too_long(f"{field}: {len(ids)} tokens leave no room in", field)
            if body.token_limit is not None and body.token_limit > room:
                raise self._too_long(
                    f"{field}: {len(ids)} tokens and {body.token_limit} to generate exceed", field
                )
            self._check_prompt_scores(body, len(ids))
            limits.append(min(default, room) if body.token_limit is None else body.token_limit)
            if body.min_tokens > limits[-1]:
                expected = f"a whole number from 0 to {limits[-1]}, the tokens to generate"
                raise RequestError(
                    f"min_tokens={body.min_tokens}: expected {expected}",
                    param="min_tokens",
                    code="invalid_value",
                )
        return Prepared(body, prompts, limits)

    def _check_prompt_scores(self, body: GenerationRequest, num_tokens: int) -> None:
        num = body.num_prompt_logprobs
        if num is not None and num_tokens * (num + 1) > _MAX_PROMPT_SCORES:
            field = "prompt_logprobs" if body.prompt_logprobs == num else "logprobs"
            fitting = _MAX_PROMPT_SCORES // num_tokens - 1
            expected = f"a whole number from 0 to {fitting}" if fitting >= 0 else "none"
            raise RequestError(
                f"{field}={num}: expected {expected} with a prompt of {num_tokens} tokens",
                param=field,
                code="invalid_value",
            )

    # --- streams

    def _start(
        self, prepared: Prepared, style: replies.Style, seed: int, request_id: str, received: float
    ) -> Session:
        """Choices of prompt p have the indices p * n .. p * n + n - 1, as OpenAI numbers them."""
        body = prepared.body
        eos = () if body.ignore_eos else self._tokenizer.stop_ids
        stop_ids = tuple(dict.fromkeys((*eos, *body.stop_token_ids)))
        choices: list[Choice] = []
        echoes: Sequence[str | None] = prepared.echoes or [None] * len(prepared.prompts)
        for prompt_index, (ids, limit) in enumerate(zip(prepared.prompts, prepared.limits, strict=True)):
            for choice in range(body.n):
                stream = StreamRequest(
                    id=f"{request_id}-{prompt_index}-{choice}",
                    prompt_ids=tuple(ids),
                    sampling=body.sampling(seed, prompt_index, choice),
                    max_tokens=max(1, limit),  # an echo alone still is a prompt to run
                    stop_ids=stop_ids,
                    speculate=body.speculation and self._config.speculation.enabled,
                    logprobs=body.num_logprobs,
                    prompt_logprobs=body.num_prompt_logprobs,
                    priority=body.priority,
                    cache_salt=body.cache_salt,
                )
                choices.append(
                    Choice(
                        len(choices),
                        stream,
                        self._tokenizer,
                        body.stop,
                        received,
                        echo=echoes[prompt_index],
                        is_echo_only=limit == 0,
                    )
                )
        keepalive_s = self._config.gateway.keepalive_s
        return Session(
            body=body,
            style=style,
            choices=choices,
            num_prompt=sum(map(len, prepared.prompts)),
            answer_id=style.prefix + request_id,
            model=self._model.id,
            pieces=run_choices(choices, self._streams, self._metrics, keepalive_s=keepalive_s),
        )


def build_app(
    config: ClusterConfig, streams: Streams, tokenizer: Tokenizer, metrics: Metrics, *, max_context: int
) -> FastAPI:
    """The gateway's HTTP application.

    Args:
        max_context: tokens of prompt and output together, already the smaller of configuration and model.
    """
    ingress = Ingress(config, streams, tokenizer, metrics, max_context=max_context)
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))(ingress.chat)
    app.post("/v1/completions", openapi_extra=_body(CompletionRequest))(ingress.completions)
    app.get("/v1/models")(ingress.models)
    app.get("/v1/models/{model_id:path}")(ingress.model)
    app.get("/health")(ingress.health)
    app.get("/ready")(ingress.ready)
    for kind in (PacelineError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(
        Envelope,
        metrics=metrics,
        max_body_bytes=config.gateway.max_body_bytes,
        routes=("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/", "/health", "/ready"),
    )
    _describe_bodies(app)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    return problem_of(error).response()


def _json(reply: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _body(kind: type[GenerationRequest]) -> dict[str, Any]:
    """The routes read their bodies themselves; this tells OpenAPI what they expect."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(app: FastAPI) -> None:
    """Add the request models to /openapi.json."""
    make_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        document = make_openapi()
        _, schemas = models_json_schema(
            [(ChatRequest, "validation"), (CompletionRequest, "validation")],
            ref_template="#/components/schemas/{model}",
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
