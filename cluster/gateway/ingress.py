"""HTTP request -> one stream for each prompt and choice -> JSON, or server-sent events; always in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import UNSET
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from paceline.cluster.config import ClusterConfig
from paceline.cluster.errors import PacelineError, RateLimited, RequestError, Unavailable
from paceline.cluster.gateway import replies, sse
from paceline.cluster.gateway.choices import Choice, run_choices
from paceline.cluster.gateway.cors import Cors
from paceline.cluster.gateway.envelope import Caller, Envelope
from paceline.cluster.gateway.journal import Journal
from paceline.cluster.gateway.limits import Counter, Door, LocalCounter, Pass
from paceline.cluster.gateway.logprobs import TokenNames
from paceline.cluster.gateway.openapi import describe
from paceline.cluster.gateway.problems import problem_of
from paceline.cluster.gateway.resume import Cursor, fingerprint, parse_last_event
from paceline.cluster.gateway.schemas import ChatRequest, CompletionRequest, GenerationRequest, Prompt, parse
from paceline.cluster.gateway.session import Session
from paceline.cluster.gateway.streams import Streams
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.keys import KeyStore, is_loopback
from paceline.cluster.learning.consent import decide, tenant_of
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

    @property
    def max_cost(self) -> int:
        """Tokens that it may cost at most, as its key's limits count them."""
        return sum(map(len, self.prompts)) + sum(self.limits) * self.body.n


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
        counter: Counter | None = None,
    ) -> None:
        self._config = config
        self._door = Door(counter or LocalCounter(), config.limits.of_a_key)
        self._streams = streams
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer)
        self._metrics = metrics
        self._max_context = max_context
        self._model = replies.Model(
            id=config.model.name,
            created=int(time.time()),
            max_model_len=max_context,
            quantization="int8" if config.model.int8_weights else UNSET,
        )

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, self._prepare_chat, replies.ChatStyle)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, self._prepare_completion, replies.TextStyle)

    async def models(self) -> Response:
        return _json(replies.ModelList(data=[self._model]))

    async def model(self, model_id: str) -> Response:
        self._check_model(model_id or "(none)")
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
        _check_content(request.headers)
        data = await request.body()
        prepared: Prepared
        if len(data) > _INLINE_BYTES:
            prepared = await asyncio.to_thread(prepare, data)
        else:
            prepared = prepare(data)
        body = prepared.body
        seed = body.chosen_seed()
        dressed = style(self._names, body.num_logprobs or 0)
        caller: Caller = request.state.caller
        session = self._start(prepared, dressed, seed, caller)
        caller.record.session = session
        if body.stream:
            session = self._resume(session, request.headers)
        passed = await self._enter(caller, prepared)
        headers = {"x-paceline-seed": str(seed), **passed.headers}
        if body.stream:
            return sse.EventStream(session.frames(), headers, on_end=lambda: passed.settle(session.num_used))
        try:
            answer = await sse.until_disconnect(request.receive, session.whole())
        finally:
            passed.settle(session.num_used)
        return Response(answer, headers=headers, media_type="application/json")

    async def _enter(self, caller: Caller, prepared: Prepared) -> Pass:
        try:
            return await self._door.enter(caller.key, prepared.max_cost)
        except RateLimited:
            self._metrics.turned_away.labels("key_limit").inc()
            raise

    def _resume(self, session: Session, headers: Headers) -> Session:
        """Events get ids for clients that say they read event streams: widespread ones choke on any line but data."""
        last_id = headers.get("last-event-id", "")
        if not last_id and sse.EventStream.media_type not in headers.get("accept", ""):
            return session
        body = session.body
        form = (session.style.whole_object, session.model, body.stop, body.include_stop_str_in_output)
        told = fingerprint([choice.request for choice in session.choices], *form, body.echoes)
        last = parse_last_event(last_id) if last_id else None
        cursor = Cursor(len(session.choices), told, last)
        if last is not None:
            self._metrics.resumed.inc()
        return dataclasses.replace(session, cursor=cursor)

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

    def _start(self, prepared: Prepared, style: replies.Style, seed: int, caller: Caller) -> Session:
        """Choices of prompt p have the indices p * n .. p * n + n - 1, as OpenAI numbers them."""
        body = prepared.body
        eos = () if body.ignore_eos else self._tokenizer.stop_ids
        stop_ids = tuple(dict.fromkeys((*eos, *body.stop_token_ids)))
        choices: list[Choice] = []
        tenant, rule = tenant_of(caller.key, self._config.learning)
        decision = decide(self._config.learning.enabled, rule, body.store)
        self._metrics.consent.labels(decision).inc()
        echoes: Sequence[str | None] = prepared.echoes or [None] * len(prepared.prompts)
        for prompt_index, (ids, limit) in enumerate(zip(prepared.prompts, prepared.limits, strict=True)):
            for choice in range(body.n):
                stream = StreamRequest(
                    id=f"{caller.stream_id}-{prompt_index}-{choice}",
                    prompt_ids=tuple(ids),
                    sampling=body.sampling(seed, prompt_index, choice),
                    max_tokens=max(1, limit),  # an echo alone still is a prompt to run
                    stop_ids=stop_ids,
                    speculate=body.speculation and self._config.speculation.enabled,
                    logprobs=body.num_logprobs,
                    prompt_logprobs=body.num_prompt_logprobs,
                    priority=body.priority,
                    cache_salt=caller.salt(body.cache_salt),
                    tenant=tenant,
                    domain=body.domain,
                    capture=decision == "kept",
                )
                choices.append(
                    Choice(
                        len(choices),
                        stream,
                        self._tokenizer,
                        body.stop,
                        caller.received,
                        keep_stop=body.include_stop_str_in_output,
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
            answer_id=style.prefix + caller.request_id,
            model=self._model.id,
            created=int(time.time()),
            keepalive_s=keepalive_s,
            pieces=run_choices(choices, self._streams, self._metrics, keepalive_s=keepalive_s),
        )


def build_app(
    config: ClusterConfig,
    streams: Streams,
    tokenizer: Tokenizer,
    metrics: Metrics,
    *,
    max_context: int,
    keys: KeyStore | None = None,
    journal: Journal | None = None,
    counter: Counter | None = None,
) -> FastAPI:
    """The gateway's HTTP application.

    Args:
        max_context: tokens of prompt and output together, already the smaller of configuration and model.
        keys: who may use it; None lets everybody.
        journal: where requests leave their log lines and traces; by default they leave lines.
        counter: who counts requests of keys with limits; this process alone by default.
    """
    ingress = Ingress(config, streams, tokenizer, metrics, max_context=max_context, counter=counter)
    only_local = keys is None and config.gateway.auth == "auto" and is_loopback(config.gateway.host)
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.post("/v1/chat/completions")(ingress.chat)
    app.post("/v1/completions")(ingress.completions)
    app.get("/v1/models")(ingress.models)
    app.get("/v1/models/{model_id:path}")(ingress.model)
    app.get("/health")(ingress.health)
    app.get("/ready")(ingress.ready)
    for kind in (PacelineError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(
        Envelope,
        metrics=metrics,
        journal=journal or Journal(),
        keys=keys,
        only_local=only_local,
        max_body_bytes=config.gateway.max_body_bytes,
        body_timeout_s=config.gateway.client_timeout_s,
        routes=("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/", "/health", "/ready"),
        cors=Cors(config.gateway.cors_origins),
    )
    document = describe(
        config.model.name,
        max_context=max_context,
        vocab_size=tokenizer.vocab_size,
        refusals=[401, 403] if keys is not None else [421] if only_local else [],
    )
    app.openapi = lambda: document  # type: ignore[method-assign]
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    request.state.caller.record.error = problem.code
    return problem.response()


def _json(reply: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _check_content(headers: Headers) -> None:
    """JSON must be announced as such: then no web page can send a request here without its browser asking first."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"Content-Type={kind[:80]!r}: expected application/json"
        raise RequestError(message, param="content-type", code="unsupported_media_type", status=415)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        message = f"Content-Encoding={coding[:80]!r}: expected none"
        raise RequestError(message, param="content-encoding", code="unsupported_media_type", status=415)
