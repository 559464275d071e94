"""headers of a request -> whose key it carries, or that it needs none; else a 4xx in OpenAI's shape."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from paceline.cluster.errors import RequestError
from paceline.cluster.keys import Key, KeyStore, is_loopback

_PORT = re.compile(r":[0-9]*\Z")

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What probes ask, who have no key. Every other path, known or not, needs one."""


def authenticate(headers: Headers, store: KeyStore) -> Key:
    """The key of `Authorization: Bearer KEY`.

    Raises:
        RequestError: 401; there is none, or it is not valid. The message never repeats it. 403; it is an operator's.
        Unavailable: keys cannot be checked.
    """
    given = headers.getlist("authorization")
    if not given:
        raise _refusal("no API key was sent; expected the header `Authorization: Bearer KEY`")
    scheme, _, text = given[0].partition(" ")
    key = store.find(text.strip()) if len(given) == 1 and scheme.lower() == "bearer" else None
    if key is None:
        raise _refusal(
            "the API key is not valid; expected `Authorization: Bearer KEY` with a key that was not revoked"
        )
    if key.scope != "user":
        raise RequestError(
            f"this API key has the scope {key.scope}: it opens Control and not this API; expected one of scope user",
            code="wrong_scope",
            status=403,
        )
    return key


def check_host(headers: Headers) -> None:
    """Where this machine's users need no key, a web page must not pass for one.

    It cannot read what another site answers, unless its own name was made to stand for 127.0.0.1: then the browser sends
    that name as Host.

    Raises:
        RequestError: 421; the request was sent to another name than this machine's for itself.
    """
    given = headers.getlist("host")
    name = _PORT.sub("", given[0]).strip("[]").lower() if len(given) == 1 else ""
    if not is_loopback(name):
        message = (
            f"Host={', '.join(given)[:80]!r}: expected localhost or a loopback address, since this listener needs no key; "
            "set gateway.auth to serve other names"
        )
        raise RequestError(message, param="host", code="misdirected_request", status=421)


def _refusal(message: str) -> RequestError:
    return RequestError(message, code="invalid_api_key", status=401)
