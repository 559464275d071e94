"""Headers of a request to Control -> who sent it, or why it goes no further; all answers -> the same with strict headers.

Two ways in: `Authorization: Bearer KEY` for programs, and a session's cookie for browsers. A browser sends cookies by
itself, whichever page asked it to: so what changes something needs the session's token in a header and a page of ours
as its origin. No path is open but those named here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.cluster.admin.key import AdminKey
from paceline.cluster.admin.problems import AdminError, answer_of, as_admin_error
from paceline.cluster.admin.sessions import Attempts, Clock, Session, Sessions
from paceline.cluster.errors import RequestError
from paceline.cluster.gateway.auth import check_host
from paceline.cluster.keys import KeyFile

log = structlog.get_logger(__name__)

API = "/admin/api"
SESSION_PATH = f"{API}/session"
CSRF_HEADER = "x-csrf-token"
_OPEN = frozenset({"/health"})
_OPEN_ON_LOOPBACK = frozenset({"/metrics", f"{API}/status"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_KEY_NAMES = frozenset({"key", "admin_key", "api_key", "apikey", "token", "access_token", "password"})
_MAX_BODY_BYTES = 64 << 10
_BODY_TIMEOUT_S = 10.0
_CSP = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""On every answer; a handler that says something else about caching is heard."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks."""

    name: str
    """key:ID or session:ID, for the audit trail."""
    address: str
    session: Session | None = None


class Authority:
    """The key, the sessions made with it, and how often an address may be wrong."""

    def __init__(
        self,
        key: AdminKey,
        *,
        is_local: bool,
        port: int = 0,
        keys: KeyFile | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`keys`: those of scope admin among them open Control as well."""
        self.key = key
        self._keys = keys
        self.is_local = is_local
        """Whether only this machine reaches the listener."""
        self.sessions = Sessions(clock)
        self._wrong = Attempts(clock, burst=10, every_s=6.0)
        # Cookies know no ports: two clusters on one machine need two names. Off loopback the name's prefix makes
        # browsers refuse one that was set without TLS or by a neighbouring host.
        self.cookie = f"paceline_admin_{port}" if is_local else "__Host-paceline_admin"
        self.cookie_path = "/admin" if is_local else "/"

    def check_key(self, text: str, address: str) -> str:
        """Let a key pass; its id.

        Raises:
            AdminError: it is wrong or no operator's, there is none to compare with, or this address was wrong too often.
            Unavailable: it is not the admin key, and others cannot be checked.
        """
        if not self.key.exists and (self._keys is None or not self._keys.has_admin()):
            raise AdminError(
                503,
                "no_admin_key",
                "Control was started without an admin key, so nobody can sign in",
                "start it with `paceline serve`, or with PACELINE_ADMIN_KEY set",
            )
        place = _network(address)
        wait_s = self._wrong.wait_s(place)
        if wait_s > 0:
            raise AdminError(
                429,
                "too_many_wrong_keys",
                "too many wrong keys came from this address",
                f"wait {wait_s:.0f} s; sessions that are open go on",
                retry_after_s=wait_s,
            )
        if self.key.matches(text):
            return self.key.id
        found = self._keys.find(text) if self._keys is not None and text else None
        if found is not None and found.scope == "admin":
            return found.id
        if found is not None:
            raise AdminError(
                403,
                "wrong_scope",
                f"this API key has the scope {found.scope}: it opens the API at gateways, and nothing here",
                "use the admin key, or one made with `paceline keys create NAME --scope admin`",
            )
        self._wrong.take(place)
        raise AdminError(
            401,
            "wrong_admin_key",
            "the admin key is not valid",
            "use the key in PACELINE_ADMIN_KEY or admin.key in PACELINE_HOME of who started the cluster",
        )

    def session_of(self, headers: Headers, *, touch: bool = True) -> Session | None:
        """The living session whose cookie came along."""
        jar = SimpleCookie()
        for line in headers.getlist("cookie"):
            try:
                jar.load(line)
            except CookieError:
                continue
        found = jar.get(self.cookie)
        return self.sessions.find(found.value, touch=touch) if found is not None else None


class Guard:
    """Middleware around every route of Control. Leaves `actor` in the request's state: None where nobody need be known."""

    def __init__(
        self, app: ASGIApp, *, authority: Authority, refused: Callable[[Actor, str, AdminError], None]
    ) -> None:
        """`refused`: told of each refusal of something that would have changed something, with its method and path."""
        self._app = app
        self._authority = authority
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def send_guarded(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            scope.setdefault("state", {})["actor"] = self._admit(scope)
            if scope["method"] not in _SAFE:
                receive = await _whole(receive, Headers(scope=scope))
            await self._app(scope, receive, send_guarded)
        except ClientDisconnect:
            return  # a browser left its stream of events: nobody is there to be told anything
        except Exception as error:
            if is_started:
                raise
            await answer_of(error)(scope, receive, send_guarded)

    def _admit(self, scope: Scope) -> Actor | None:
        headers, path, is_safe = Headers(scope=scope), scope["path"], scope["method"] in _SAFE
        address = address_of(scope)
        try:
            if self._authority.is_local:
                _check_local_name(headers)
            _check_query(scope["query_string"])
            if not is_safe:
                _check_origin(headers)
            return self._identify(headers, scope["method"], path, address)
        except AdminError as error:
            if not is_safe:
                session = self._authority.session_of(headers, touch=False)
                name = "nobody" if session is None else f"session:{session.id}"
                self._refused(Actor(name, address, session), f"{scope['method']} {path}", error)
            raise

    def _identify(self, headers: Headers, method: str, path: str, address: str) -> Actor | None:
        given = headers.getlist("authorization")
        if given:
            scheme, _, text = given[0].partition(" ")
            is_bearer = len(given) == 1 and scheme.lower() == "bearer"
            id = self._authority.check_key(text.strip() if is_bearer else "", address)
            return Actor(f"key:{id}", address)
        is_stream = path == f"{API}/events"
        session = self._authority.session_of(headers, touch=not is_stream)
        is_safe = method in _SAFE
        if session is None:
            # Signing in and asking whether one is: the key in the body is all the proof that the first needs.
            is_sign_in = path == SESSION_PATH and method in ("GET", "POST")
            if is_sign_in or self._is_open(path, is_safe=is_safe):
                return None
            raise AdminError(
                401,
                "not_signed_in",
                "this needs the admin key or a session",
                f"sign in at /admin, POST the key to {SESSION_PATH}, or send `Authorization: Bearer KEY`",
            )
        if not is_safe and (method, path) != ("POST", SESSION_PATH):
            _check_token(headers, session)
        return Actor(f"session:{session.id}", address, session)

    def _is_open(self, path: str, *, is_safe: bool) -> bool:
        if path in _OPEN or (self._authority.is_local and path in _OPEN_ON_LOOPBACK):
            return True
        is_page = path in ("/", "/admin") or (path.startswith("/admin/") and not _is_api(path))
        return is_page and is_safe  # the dashboard's files tell nothing of this cluster


def address_of(scope: Scope) -> str:
    """The peer's own address: headers that name another can be made up by anybody."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def check_session_origin(headers: Headers) -> None:
    """What a session asks to change comes from a page of ours, and browsers say so."""
    if "origin" not in headers:
        raise AdminError(
            403,
            "origin_missing",
            "a session's request that changes something needs the Origin header",
            "use the dashboard, or the admin key as `Authorization: Bearer KEY` from programs",
        )


def _check_token(headers: Headers, session: Session) -> None:
    check_session_origin(headers)
    token = headers.get(CSRF_HEADER)
    if token is None or not session.allows(token):
        raise AdminError(
            403,
            "csrf_missing" if token is None else "csrf_wrong",
            "the session's CSRF token " + ("is missing" if token is None else "is not this session's"),
            f"GET {SESSION_PATH} tells it; send it as X-CSRF-Token",
        )


def _check_local_name(headers: Headers) -> None:
    try:
        check_host(headers)
    except RequestError:
        given = ", ".join(headers.getlist("host"))[:80]
        raise AdminError(
            421,
            "misdirected_request",
            f"Host={given!r}: expected localhost or a loopback address",
            "call it by localhost; set control.host to serve other names",
            field="host",
        ) from None


def _check_query(query: bytes) -> None:
    if not query:
        return
    names = {name.lower() for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True)}
    found = sorted(names & _KEY_NAMES)
    if found:
        raise AdminError(
            400,
            "key_in_url",
            f"the address has a field {found[0]!r}: keys do not belong into addresses, which are logged and kept",
            "send `Authorization: Bearer KEY`; if that was the admin key, replace it",
            field=found[0],
        )


def _check_origin(headers: Headers) -> None:
    """A request that changes something and says which page it comes from comes from one of ours."""
    origins = headers.getlist("origin")
    site = headers.get("sec-fetch-site", "same-origin")
    is_ours = all(_is_same_place(origin, headers.get("host", "")) for origin in origins)
    if len(origins) > 1 or not is_ours or site not in ("same-origin", "none"):
        raise AdminError(
            403,
            "foreign_origin",
            f"Origin={', '.join(origins)[:80]!r}: the request comes from another site's page",
            "use the dashboard of this Control",
        )


def _is_same_place(origin: str, host: str) -> bool:
    """Scheme aside, since a proxy may add TLS: what counts is host and port."""
    try:
        parts, ours = urlsplit(origin), urlsplit(f"//{host}")
        default = {"http": 80, "https": 443}[parts.scheme]
        port, our_port = parts.port or default, ours.port or default
    except (KeyError, ValueError):
        return False
    return bool(parts.hostname) and parts.hostname == ours.hostname and port == our_port


def _is_api(path: str) -> bool:
    return path == API or path.startswith(f"{API}/")


def _network(address: str) -> str:
    """Who has one IPv6 address has 2^64 of them."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 6 and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


async def _whole(receive: Receive, headers: Headers) -> Receive:
    """`receive` of a body that has arrived, is not too large and is announced as JSON if there is any."""
    too_large = AdminError(
        413, "body_too_large", f"the body is larger than {_MAX_BODY_BYTES} bytes", "send less"
    )
    length = headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 9 or int(length) > _MAX_BODY_BYTES):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    break
                body += message.get("body", b"")
                if len(body) > _MAX_BODY_BYTES:
                    raise too_large
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        complaint = f"the body did not arrive within {_BODY_TIMEOUT_S:g} s"
        raise AdminError(408, "request_timeout", complaint, "send it again") from None
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != "application/json":
        raise AdminError(
            415,
            "unsupported_media_type",
            f"Content-Type={kind[:80]!r}: expected application/json",
            "send JSON and say so",
            field="content-type",
        )
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return replay


def is_refusal(error: Exception) -> bool:
    """Whether an action was refused, rather than that it broke."""
    return as_admin_error(error).status < 500
