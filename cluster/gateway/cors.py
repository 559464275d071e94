"""Origin of a request -> headers by which browsers let a page of that origin read the answer: closed unless configured."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Send

_METHODS = "GET, POST"
_REQUEST_HEADERS = (
    "authorization, content-type, accept, last-event-id, x-request-id, openai-organization, openai-project, "
    "x-stainless-arch, x-stainless-lang, x-stainless-os, x-stainless-package-version, x-stainless-retry-count, "
    "x-stainless-runtime, x-stainless-runtime-version, x-stainless-timeout"
)
"""What a page may send: what this API reads, and what OpenAI's client says of itself."""
_ANSWER_HEADERS = (
    "x-request-id, x-paceline-seed, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    "x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_MAX_AGE_S = "600"


class Cors:
    """Which pages may call."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def allows(self, headers: Headers) -> bool:
        """Whether a request comes from a page that may call; two origins are none."""
        given = headers.getlist("origin")
        return len(given) == 1 and given[0] in self._origins

    def is_preflight(self, method: str, headers: Headers) -> bool:
        """Whether a browser asks if such a page may call. It sends no key with that."""
        return method == "OPTIONS" and "access-control-request-method" in headers and self.allows(headers)

    def mark(self, message: Message, headers: Headers) -> None:
        """Add to the start of an answer what a page that may call needs to read it. No cookies: keys are sent by hand."""
        if not self._origins:
            return
        answer = MutableHeaders(scope=message)
        answer.add_vary_header("origin")
        if self.allows(headers):
            answer["access-control-allow-origin"] = headers["origin"]
            answer["access-control-expose-headers"] = _ANSWER_HEADERS

    @staticmethod
    async def answer_preflight(send: Send) -> None:
        """Yes, and what may be sent."""
        told = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": _REQUEST_HEADERS,
            "access-control-max-age": _MAX_AGE_S,
            "content-length": "0",
        }
        raw = [(name.encode(), value.encode()) for name, value in told.items()]
        await send({"type": "http.response.start", "status": 204, "headers": raw})
        await send({"type": "http.response.body", "body": b""})
