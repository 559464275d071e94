"""Requests whose answers are known -> streams of a cluster over HTTP -> what each client saw, and when.

The in-process engine says what every text must be: one request with one seed gives one text, whatever happens to
the workers behind the gateway.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.types import Request

_PATIENCE_S = 150.0
"""For one whole stream, with all that happens to it."""
_AGAIN_S = 0.1
"""Between two attempts of a client whose gateway is gone."""
_FINAL = ("HTTP 500", "HTTP 4")
"""Answers that no gateway's death explains: coming again would hide a defect."""


@dataclass(frozen=True, slots=True)
class How:
    """The ways in which the same request can be sent."""

    salt: str
    """Prompts with a salt of their own are found in no prefix cache: they are computed again."""
    stream: bool = True
    n: int = 1
    resume: bool = False
    """Come again, with the same id and Last-Event-ID, when the connection breaks."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and the answer it must get."""

    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float
    tokens: tuple[int, ...]
    text: str

    def body(self, model: str, how: How) -> dict[str, Any]:
        """Of a completion."""
        body = {
            "model": model,
            "prompt": list(self.prompt_ids),
            "max_tokens": len(self.tokens),
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": how.stream,
            "cache_salt": how.salt,
            "n": how.n,
        }
        return {**body, "stream_options": {"include_usage": True}} if how.stream else body


@dataclass(slots=True)
class Answer:
    """What a client saw of one stream. Times are of the machine's monotonic clock."""

    request_id: str
    began: float = 0.0
    text: str = ""
    num_tokens: int = -1
    """Of one choice, as the usage said; -1 if it never came."""
    finish: str | None = None
    error: str = ""
    events: list[float] = field(default_factory=list)
    """When text came."""
    metrics: dict[str, Any] = field(default_factory=dict)
    resumes: int = 0
    """Connections made again, behind the first."""
    last_event_id: str = ""

    @property
    def workers(self) -> set[str]:
        """Everybody who served it, as the answer's own metrics say."""
        named = [self.metrics.get("prefill_worker", ""), self.metrics.get("draft_worker", "")]
        return {name for name in [*self.metrics.get("decode_workers", []), *named] if isinstance(name, str)}

    def names(self, worker: str) -> bool:
        """Whether the answer says that this worker served it. Of a stream that was moved it names all decode workers,
        but only the last attempt's prefill and draft workers: any may have been there before."""
        is_lost = bool(self.metrics.get("recoveries")) and not worker.startswith("decode-")
        return worker in self.workers or is_lost

    def wait_after(self, moment: float) -> float:
        """The longest time without text behind `moment`, until the stream's end; waits that began before count from it."""
        marks = [max(moment, self.began), *(at for at in self.events if at > moment)]
        return max((b - a for a, b in pairwise(marks)), default=0.0)

    def wrong_tokens(self, ask: Ask, tokenizer: Tokenizer) -> int:
        """Tokens that differ from the expected text, are missing, or came twice."""
        if self.text == ask.text and self.num_tokens == len(ask.tokens):
            return 0
        known = 0
        while known < len(ask.tokens) and self.text.startswith(tokenizer.decode(ask.tokens[: known + 1])):
            known += 1
        return max(1, len(ask.tokens) - known, self.num_tokens - len(ask.tokens))


def expect(model: Path, requests: Sequence[Request]) -> list[Ask]:
    """Run the requests on one engine in this process, one row of drafts never among them."""
    from paceline.deploy.bench import inprocess

    runner = inprocess.load(model)
    outputs = inprocess.generate(inprocess.new_engine(runner, None, 16), requests, 16).outputs
    tokenizer = Tokenizer(model)
    return [
        Ask(r.prompt_ids, r.sampling.seed, r.sampling.temperature, tuple(outputs[r.id]), tokenizer.decode(outputs[r.id]))
        for r in requests
    ]  # fmt: skip


class Clients:
    """Clients of one gateway, each with connections of its own."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self._model = model
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(30.0), limits=httpx.Limits(max_keepalive_connections=0)
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, ask: Ask, request_id: str, how: How) -> Answer:
        """One request to its end, or its failure."""
        answer = Answer(request_id, time.monotonic())
        end = answer.began + _PATIENCE_S
        while True:
            try:
                again = await (
                    self._follow(ask, answer, how) if how.stream else self._whole(ask, answer, how)
                )
            except httpx.HTTPError as error:
                again = f"{type(error).__name__}: {error}"
            if not again:
                return answer
            if not how.resume or time.monotonic() > end or again.startswith(_FINAL):
                answer.error = again
                return answer
            answer.resumes += 1
            await asyncio.sleep(_AGAIN_S)

    async def _whole(self, ask: Ask, answer: Answer, how: How) -> str:
        """All of it in one JSON object; why the client has to come again, or nothing."""
        headers = {"x-request-id": answer.request_id}
        reply = await self._http.post(
            f"{self.url}/v1/completions", json=ask.body(self._model, how), headers=headers
        )
        if reply.status_code != 200:
            return f"HTTP {reply.status_code}: {reply.text[:300]}"
        found = reply.json()
        answer.events.append(time.monotonic())
        answer.text, answer.finish = found["choices"][0]["text"], found["choices"][0]["finish_reason"]
        answer.num_tokens = found["usage"]["completion_tokens"] // how.n
        answer.metrics = found["metrics"]
        return ""

    async def _follow(self, ask: Ask, answer: Answer, how: How) -> str:
        """Read one connection to its end; why the client has to come again, or nothing."""
        headers = {"x-request-id": answer.request_id, "accept": "text/event-stream"}
        if answer.last_event_id:
            headers["last-event-id"] = answer.last_event_id
        body = ask.body(self._model, how)
        async with self._http.stream(
            "POST", f"{self.url}/v1/completions", json=body, headers=headers
        ) as reply:
            if reply.status_code != 200:
                text = (await reply.aread()).decode(errors="replace")[:300]
                return f"HTTP {reply.status_code}: {text}"
            event_id = data = ""
            async for line in reply.aiter_lines():
                name, _, value = line.partition(":")
                if name == "id":
                    event_id = value.strip()
                elif name == "data":
                    data = value.strip()
                elif line or not data:
                    continue
                elif data == "[DONE]":
                    return "" if answer.finish else "ended without a finish"
                else:  # the blank line behind an event: only now it is whole
                    self._read(json.loads(data), answer)
                    answer.last_event_id = event_id or answer.last_event_id
                    data = ""
                    if answer.error:
                        return ""
        return "the stream broke off"

    @staticmethod
    def _read(event: dict[str, Any], answer: Answer) -> None:
        if "error" in event:
            answer.error = str(event["error"].get("message", event["error"]))[:300]
            return
        for choice in event.get("choices", ()):
            if choice["text"]:
                answer.events.append(time.monotonic())
                answer.text += choice["text"]
            answer.finish = choice["finish_reason"] or answer.finish
        if event.get("usage"):
            answer.num_tokens = event["usage"]["completion_tokens"]
        answer.metrics = event.get("metrics") or answer.metrics
