"""headers of a request -> whose key it carries, or a 401 in OpenAI's shape."""

from __future__ import annotations

from starlette.datastructures import Headers

from paceline.cluster.errors import RequestError
from paceline.cluster.keys import Key, KeyStore

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What probes ask, who have no key. Every other path, known or not, needs one."""


def authenticate(headers: Headers, store: KeyStore) -> Key:
    """The key of `Authorization: Bearer KEY`.

    Raises:
        RequestError: 401; there is none, or it is not valid. The message never repeats it.
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
    return key


def _refusal(message: str) -> RequestError:
    return RequestError(message, code="invalid_api_key", status=401)
