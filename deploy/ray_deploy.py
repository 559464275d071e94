"""A configuration and the address of a Ray cluster -> the application on it, all its replicas running, or one clear line.

Speaks to Ray's dashboard as `serve deploy` does. A second deployment with another configuration replaces replicas one
at a time; only another number of replicas restarts nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx

from paceline.cluster.errors import ConfigError, PacelineError, Unavailable
from paceline.deploy.serve_config import APP_NAME

APPLICATIONS = "/api/serve/applications/"
_TRY_AGAIN_S, _POLL_S = 2.0, 0.5
_ANSWER_S = 180.0
_UNDECIDED = ("NOT_STARTED", "DEPLOYING", "DELETING", "UNHEALTHY")
_FINAL_LINE = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception|Unavailable)): ?(.*)$")
Say = Callable[[str], None]


def dashboard_url(address: str) -> str:
    """`--ray` -> the URL of Ray's dashboard; `auto` is this machine's.

    Raises:
        ConfigError: it is neither.
    """
    text = "http://127.0.0.1:8265" if address == "auto" else address.rstrip("/")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, TypeError):
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.path not in ("", "/"):
        raise ConfigError(f"--ray {address!r}: expected http://HOST:8265, where Ray's dashboard is, or auto")
    return text


def ray_token() -> str | None:
    """As Ray looks for it: RAY_AUTH_TOKEN, the file in RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.

    Raises:
        ConfigError: the file cannot be read.
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given) if given else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        if given:
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH={given}: no such file") from None
        return None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"Ray's token file {path}: cannot be read: {error}") from error


class RayCluster:
    """Ray's dashboard, as far as Serve is concerned."""

    def __init__(
        self, url: str, token: str | None, *, say: Say, transport: httpx.BaseTransport | None = None
    ):
        """`say` is told, once each, what is being waited for."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # The first deployment starts Serve itself, which a busy head takes its time for.
        timeout = httpx.Timeout(_ANSWER_S, connect=10.0)
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout, transport=transport)
        self._url, self._say, self._said = url, say, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def deploy(self, serve_config: dict[str, Any], *, patience_s: float) -> None:
        """Hand the configuration over; an address where nothing answers is tried for `patience_s`.

        Raises:
            Unavailable: nothing answers.
            PacelineError: Ray refuses it, and says why.
        """
        answer = self._ask("PUT", patience_s, json=serve_config)
        if answer.status_code != 200:
            raise PacelineError(f"Ray at {self._url} refuses the application: {last_line(answer.text)}")

    def wait_until_running(self, *, limit_s: float) -> None:
        """Until Serve says that the whole application is as configured.

        Raises:
            PacelineError: it cannot be built, a worker fails at its start, or it takes longer than `limit_s`.
        """
        end = time.monotonic() + limit_s
        is_refused = False
        while True:
            found = self._application(max(1.0, end - time.monotonic()))
            status = found.get("status", "NOT_STARTED")
            if status == "RUNNING":
                return
            is_refused, was_refused = status not in _UNDECIDED, is_refused
            if is_refused and was_refused:  # twice: the first look may still have seen the deployment before
                raise PacelineError(f"not deployed: {_reason(found)}")
            if time.monotonic() > end:
                raise PacelineError(f"not running after {limit_s:.0f} s: {missing(found) or _reason(found)}")
            self._tell(missing(found) or "Ray Serve builds the application")
            time.sleep(_POLL_S)

    def _application(self, patience_s: float) -> dict[str, Any]:
        answer = self._ask("GET", patience_s)
        try:
            found = answer.json()["applications"].get(APP_NAME, {})
        except (ValueError, KeyError, AttributeError, TypeError):
            found = None
        if answer.status_code != 200 or not isinstance(found, dict):
            raise PacelineError(f"{self._url} does not answer as Ray's dashboard: {last_line(answer.text)}")
        return found

    def _ask(self, method: str, patience_s: float, **request: Any) -> httpx.Response:
        end = time.monotonic() + patience_s
        while True:
            try:
                answer = self._client.request(method, APPLICATIONS, **request)
                if answer.status_code in (401, 403):
                    raise PacelineError(
                        f"Ray at {self._url} wants its token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token "
                        f"{'is not the right one' if 'authorization' in self._client.headers else 'is not there'}"
                    )
                if answer.status_code < 502:
                    return answer
                reason = f"HTTP {answer.status_code}"
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            if time.monotonic() >= end:
                raise Unavailable(f"no Ray cluster answers at {self._url}: {reason}")
            self._tell(f"{self._url}: {reason}; trying again for {end - time.monotonic():.0f} s")
            time.sleep(_TRY_AGAIN_S)

    def _tell(self, text: str) -> None:
        plain = re.sub(r"for \d+ s$", "", text)
        if plain != self._said:
            self._said = plain
            self._say(text)


def missing(application: dict[str, Any]) -> str:
    """Which deployments are not as configured, in a few words: "decode: 1 of 2 running"."""
    parts = []
    for name, found in (application.get("deployments") or {}).items():
        if found.get("status") == "HEALTHY":
            continue
        running = sum(replica.get("state") == "RUNNING" for replica in found.get("replicas") or [])
        wanted = found.get("target_num_replicas", "?")
        parts.append(f"{name}: {running} of {wanted} running")
    return "; ".join(parts)


def _reason(application: dict[str, Any]) -> str:
    """What Serve knows of a failure, without its tracebacks."""
    texts = [str(application.get("message") or "")]
    for name, found in (application.get("deployments") or {}).items():
        if found.get("status") not in ("HEALTHY", "UPDATING") and found.get("message"):
            texts.append(f"{name}: {last_line(str(found['message']))}")
    reason = "; ".join(filter(None, (last_line(texts[0]), *texts[1:])))
    if "No module named 'paceline" in reason:
        reason += "; every node of the cluster needs the same wheel of Paceline in Ray's Python"
    if reason.endswith("()"):
        reason += ": why is in logs/serve of Ray's session folder on the node where it ran"
    return reason


def last_line(text: str) -> str:
    """The error at the end of a traceback, else the last line of a text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        if match := _FINAL_LINE.match(line):
            return match[2] or match[1]
    return lines[-1][:500] if lines else "no reason given"
