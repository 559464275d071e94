"""scripted streams -> the gateway around them, in process or behind a real socket, with a tokenizer of one token a byte."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from paceline.cluster.config import ClusterConfig
from paceline.cluster.gateway.fakes import Act, ScriptedStreams, say
from paceline.cluster.gateway.ingress import build_app
from paceline.cluster.gateway.journal import Journal
from paceline.cluster.gateway.listener import server_config
from paceline.cluster.gateway.streams import StreamEvent
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.keys import KeyStore
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Logprobs, Request

SPECIALS = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
EOS, END = 1, 4
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}<|assistant|>"
)
MAX_CONTEXT = 200
JSON = {"content-type": "application/json"}
CHAT: dict[str, Any] = {"model": "paceline-small", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "paceline-small", "prompt": "hi"}
NEVER = 3600.0


def byte_tokenizer(folder: Path) -> Tokenizer:
    """One token a byte."""
    vocab = {text: id for id, text in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(SPECIALS)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|bos|>", "chat_template": TEMPLATE})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, END]}))
    return Tokenizer(folder)


@contextlib.asynccontextmanager
async def listening(
    tokenizer: Tokenizer,
    metrics: Metrics,
    streams: ScriptedStreams,
    keys: KeyStore | None = None,
    journal: Journal | None = None,
    **gateway: Any,
) -> AsyncIterator[str]:
    """A real server on a free port for some scripted streams; its address."""
    config = ClusterConfig.model_validate({"gateway": gateway})
    app = build_app(config, streams, tokenizer, metrics, max_context=MAX_CONTEXT, keys=keys, journal=journal)
    timeout_s = config.gateway.client_timeout_s
    async with running(server_config(app, client_timeout_s=timeout_s, host="127.0.0.1", port=0)) as url:
        yield url


@contextlib.asynccontextmanager
async def running(config: uvicorn.Config) -> AsyncIterator[str]:
    """A server until the block ends; its address."""
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.002)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def client_for(url: str, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    """The real client, without its own retries: every failure must show."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


@contextlib.asynccontextmanager
async def inside(
    tokenizer: Tokenizer,
    metrics: Metrics,
    streams: ScriptedStreams,
    keys: KeyStore | None = None,
    **gateway: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """The application without a socket."""
    config = ClusterConfig.model_validate({"gateway": gateway})
    app = build_app(config, streams, tokenizer, metrics, max_context=MAX_CONTEXT, keys=keys)
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def spell(
    tokenizer: Tokenizer, text: str, *, group: int = 1, end: Sequence[int] = (EOS,), **options: Any
) -> list[Act]:
    """A script that says a text, `group` tokens an event, and then stops."""
    ids = tokenizer.encode(text)
    groups = [ids[start : start + group] for start in range(0, len(ids), group)]
    return say(*groups, list(end), **options)


def scored(event: StreamEvent, num_top: int) -> StreamEvent:
    """The event with log-probabilities that tell tokens apart."""
    return dataclasses.replace(event, logprobs=_logprobs(event.tokens, num_top))


def scored_spell(tokenizer: Tokenizer, text: str, request: Request) -> list[Act]:
    """A script that says a text with the log-probabilities that its request asks for."""
    events = [act for act in spell(tokenizer, text) if isinstance(act, StreamEvent)]
    if request.logprobs is not None:
        events = [scored(event, request.logprobs) for event in events]
    if request.prompt_logprobs is not None:
        prompt = _logprobs(request.prompt_ids[1:], request.prompt_logprobs)
        events[0] = dataclasses.replace(events[0], prompt_logprobs=prompt)
    return list(events)


def _logprobs(tokens: Sequence[int], num_top: int) -> Logprobs:
    own = np.array([-token / 1000 for token in tokens], "<f4").tobytes()
    ids = np.array([[token] * num_top for token in tokens], "<i4").tobytes()
    top = np.array([[-token / 1000] * num_top for token in tokens], "<f4").tobytes()
    return Logprobs(num_top, own, np.ones(len(tokens), "<i4").tobytes(), ids, top)


async def events_of(client: openai.AsyncOpenAI, path: str, body: dict[str, Any]) -> list[str]:
    """The raw events and comments of a stream."""
    async with httpx.AsyncClient(base_url=str(client.base_url)) as raw:
        response = await raw.post(path, json={**body, "stream": True})
    return response.text.split("\n\n")[:-1]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that has to become true soon."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer, which has to have OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return error
