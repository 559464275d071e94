"""Both applications from outside: every route closed unless it is named here, whatever is tried on paths and headers."""

import io
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.admin.bundle import Bundle
from paceline.cluster.admin.key import hash_key
from paceline.cluster.config import ClusterConfig, load_config
from paceline.cluster.control import Control
from paceline.cluster.gateway import envelope
from paceline.cluster.gateway.fakes import ScriptedStreams
from paceline.cluster.gateway.ingress import build_app
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.keys import KeyFile
from paceline.cluster.metrics import Metrics
from paceline.deploy.logs import configure_logs
from scripted_admin import KEY, client_of, wrong_key
from scripted_gateway import MAX_CONTEXT, TEXT, byte_tokenizer, spell

PUBLIC_AT_GATEWAYS = {("GET", "/health"), ("GET", "/ready")}
PUBLIC_AT_CONTROL = {
    ("GET", "/health"),
    ("GET", "/"),  # to the page
    ("GET", "/admin"),
    ("GET", "/admin/{path:path}"),  # the page's files, the same for every cluster
    ("HEAD", "/admin/{path:path}"),
    ("POST", "/admin/api/session"),  # the key is in its body
}
PUBLIC_ON_LOOPBACK = {("GET", "/metrics"), ("GET", "/admin/api/status")}


PAGE_FILE = b"<!doctype html>the page"


@dataclass
class Door:
    """An application, keys of all kinds, and an address from which nothing is local."""

    app: FastAPI
    base: str
    right: str
    wrong: list[str]

    def client(self, key: str | None = None) -> Any:
        """From an address of its own: who was wrong too often waits, with the right key as well."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        address = "10.0.0.9" if key is None else f"10.0.1.{len(self.wrong) - self._place(key)}"
        return client_of(self.app, base=self.base, address=address, **headers)

    def _place(self, key: str) -> int:
        return self.wrong.index(key) if key in self.wrong else -1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def store(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json", recheck_s=0.0)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def gateway(tokenizer: Tokenizer, metrics: Metrics, store: KeyFile) -> Door:
    config = ClusterConfig.model_validate({"gateway": {"host": "0.0.0.0"}})
    streams = ScriptedStreams(spell(tokenizer, "x"))
    app = build_app(config, streams, tokenizer, metrics, max_context=MAX_CONTEXT, keys=store)
    revoked, gone = store.create("gone")
    store.revoke(revoked.id)
    _, admin = store.create("operator", scope="admin")
    _, user = store.create("user")
    return Door(
        app, "http://gateway:8000", user, [wrong_key(), f"pl_{'0' * 12}_{'x' * 43}", gone, admin, KEY]
    )


@pytest.fixture
def control(store: KeyFile, tmp_path: Path) -> Door:
    part = Control(load_config(None, ["model.name=some-model", "control.host=0.0.0.0"]), keys=store)
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "index.html").write_bytes(PAGE_FILE)
    app = build_admin_app(part, hash_key(KEY), bundle=Bundle(tmp_path / "static"))
    revoked, gone = store.create("gone", scope="admin")
    store.revoke(revoked.id)
    _, user = store.create("user")
    return Door(app, "http://control:8001", KEY, [f"pl_{'0' * 12}_{'x' * 43}", gone, user])


@pytest.fixture(params=["gateway", "control"])
def door(request: pytest.FixtureRequest) -> Door:
    found: Door = request.getfixturevalue(request.param)
    return found


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """(method, path) of everything that is routed, included routers and mounted applications too."""
    found: set[tuple[str, str]] = set()

    def walk(routes: list[BaseRoute]) -> None:
        for route in routes:
            if isinstance(route, Route):
                found.update((method, route.path) for method in route.methods or {"GET", "POST"})
                continue
            inner = getattr(route, "effective_candidates", None) or getattr(route, "routes", None)
            inner = inner() if callable(inner) else inner
            assert inner is not None, f"{route!r}: this test does not know how to look into it"
            for one in inner:
                path = getattr(one, "path", None)
                if path is not None:
                    found.update((method, path) for method in getattr(one, "methods", None) or {"GET"})
                else:
                    walk([one])

    walk(list(app.routes))
    return found


def concrete(path: str) -> str:
    """A path that the route matches."""
    for name in ("{path:path}", "{model_id:path}", "{version}", "{run_id}", "{id}"):
        path = path.replace(name, "pause" if name == "{name}" else "index.html")
    return path.replace("{name}", "pause")


async def unguarded(door: Door, key: str | None) -> set[tuple[str, str]]:
    """What is answered otherwise than that the key is missing, wrong or of another scope."""
    found = set()
    async with door.client(key) as client:
        for method, path in sorted(routes_of(door.app)):
            if key == door.right and path.endswith("/events"):
                continue  # it would go on for ever
            body = {"json": {}} if method not in ("GET", "HEAD") else {}
            answer = await client.request(method, concrete(path), **body)
            if answer.status_code not in (401, 403, 429):
                found.add((method, path))
    return found


# --- default-deny -----------------------------------------------------------------------------------------


def test_the_walk_sees_every_route(gateway: Door, control: Door) -> None:
    """Or what follows would prove nothing."""
    assert {("POST", "/v1/chat/completions"), ("GET", "/openapi.json"), *PUBLIC_AT_GATEWAYS} <= routes_of(
        gateway.app
    )
    there = routes_of(control.app)
    assert there >= PUBLIC_AT_CONTROL | PUBLIC_ON_LOOPBACK
    assert {("POST", "/admin/api/actions/{name}"), ("GET", "/admin/api/events"), ("DELETE", "/admin/api/keys/{id}"),
            ("PATCH", "/admin/api/settings"), ("GET", "/admin/api/openapi.json")} <= there  # fmt: skip
    documented = {
        (method.upper(), path)
        for path, operations in control.app.openapi()["paths"].items()
        for method in operations
    }
    assert documented <= there and len(there) > 25


async def test_no_route_is_open_but_those_named_here(gateway: Door, control: Door) -> None:
    """Without a key: a route that somebody adds tomorrow is closed until it is named."""
    assert await unguarded(gateway, None) == PUBLIC_AT_GATEWAYS
    found = await unguarded(control, None)
    assert found == {route for route in PUBLIC_AT_CONTROL if route[0] != "POST"} | {
        ("POST", "/admin/api/session")  # 422: its body has no key
    }


async def test_a_route_that_is_opened_by_mistake_is_seen(
    gateway: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the walk; and a route that is only added is closed."""
    gateway.app.get("/debug")(lambda: "secret")
    assert await unguarded(gateway, None) == PUBLIC_AT_GATEWAYS
    monkeypatch.setattr(envelope, "OPEN_PATHS", envelope.OPEN_PATHS | {"/debug"})
    assert await unguarded(gateway, None) == PUBLIC_AT_GATEWAYS | {("GET", "/debug")}


async def test_wrong_revoked_and_foreign_keys_open_nothing_more(door: Door) -> None:
    """Not one route: a wrong key is worse than none where none is needed, and as good as none elsewhere."""
    public = PUBLIC_AT_GATEWAYS | PUBLIC_AT_CONTROL
    for key in door.wrong:
        assert await unguarded(door, key) <= public
    inside = await unguarded(door, door.right)
    assert len(inside) > len(public & routes_of(door.app)), "and the right one opens the rest"


async def test_a_users_key_is_told_that_it_is_the_wrong_door(gateway: Door, control: Door) -> None:
    """403 on every route of the operators' API, and an operator's at gateways."""
    for door, key in ((control, control.wrong[-1]), (gateway, gateway.wrong[-2])):
        async with door.client(key) as client:
            for method, path in sorted(routes_of(door.app) - PUBLIC_AT_CONTROL - PUBLIC_AT_GATEWAYS):
                body = {"json": {}} if method not in ("GET", "HEAD") else {}
                answer = await client.request(method, concrete(path), **body)
                assert answer.status_code == 403, (method, path)
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "wrong_scope"


async def test_operators_routes_are_on_control_s_port_only(gateway: Door, control: Door) -> None:
    """With a right key a gateway knows none of them, and Control none of a gateway's."""
    shared = {"/health", "/openapi.json"}
    mine, theirs = ({path for _, path in routes_of(door.app)} - shared for door in (gateway, control))

    assert not mine & theirs
    async with gateway.client(gateway.right) as client:
        for path in ("/metrics", "/admin", "/admin/api/overview", "/admin/api/keys", "/docs", "/redoc"):
            assert (await client.get(path)).status_code == 404, path
    async with control.client(control.right) as client:
        for path in ("/v1/models", "/v1/chat/completions", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 404, path


# --- path tricks ------------------------------------------------------------------------------------------

TRICKS = [
    "/health/../v1/models", "/health/..%2fv1/models", "/./v1/models", "//v1/models", "//health", "/health/", "/HEALTH", "/health;/v1/models",
    "/health%00", "/health\x00/v1/models", "/health%0d%0a", "/ready/../../v1/models", "/v1/models/../../health", "/v1//models",
    "/v1/models;.js", "/openapi.json/", "/v1/completions/.", "\\v1\\models", "*", "", "http://gateway/health", "/%2e%2e/health",
    "/admin/../metrics", "/admin/..;/metrics", "/admin//api/overview", "/admin/./api/overview", "/admin/%61pi/overview",
    "/admin/API/overview", "/admin/api", "/admin/api/", "/admin/api/../../metrics", "/admin/api%2foverview", "/admin/\x00api/overview",
    "/admin/api/overview/", "/admin/api/session/../overview", "/admin/api/session/overview", "/admin/..\\..\\keys.json",
    "/admin/../../../../etc/passwd", "/admin/....//....//etc/passwd", "/admin//etc/passwd", "/metrics/", "/metrics/.", "/Metrics",
]  # fmt: skip


async def raw(app: FastAPI, path: str, method: str = "GET") -> tuple[int, bytes]:
    """One request with exactly this path, which no client library would leave as it is."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
        "raw_path": path.encode("latin-1", "replace"), "query_string": b"", "root_path": "", "headers": [(b"host", b"control")],
        "client": ("10.0.0.9", 1), "server": ("control", 8001),
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


@pytest.mark.parametrize("path", TRICKS)
async def test_no_spelling_of_a_path_gets_around_the_key(gateway: Door, control: Door, path: str) -> None:
    """At a gateway every one is refused; at Control what lies under the page is the page's, which tells nothing."""
    status, body = await raw(gateway.app, path)
    assert status == 401, body
    for method in ("GET", "HEAD", "POST", "OPTIONS", "DELETE"):
        status, body = await raw(control.app, path, method)
        is_page = path.startswith("/admin/") and method in ("GET", "HEAD") and body in (b"", PAGE_FILE)
        assert status in (400, 401, 404, 405) or (status == 200 and is_page), (method, body)
        assert b"some-model" not in body and b"root:" not in body and b"paceline_" not in body


# --- headers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["a\r\nset-cookie: x=1", "a\nb", "a\x00b", "x" * 65, "", "a b", "\u00e9", "../../etc", "a;b", '{"a": 1}', "<script>"],
)  # fmt: skip
async def test_what_is_no_name_for_a_request_is_replaced_by_one(gateway: Door, value: str) -> None:
    """It comes back in a header and in logs: it may be letters, digits, dots and dashes."""
    async with gateway.client(gateway.right) as client:
        answer = await client.get("/v1/models", headers=[(b"x-request-id", value.encode())])

    given = answer.headers["x-request-id"]
    assert given != value and given.isalnum() and "set-cookie" not in answer.headers


async def test_headers_that_proxies_add_are_not_believed(control: Door, gateway: Door) -> None:
    """Whoever sends them is still where it is, and needs a key; nothing of them is in an answer."""
    lies = {
        "x-forwarded-for": "127.0.0.1", "x-real-ip": "127.0.0.1", "forwarded": "for=127.0.0.1;host=localhost",
        "x-forwarded-host": "localhost", "x-original-url": "/health", "x-rewrite-url": "/health", "x-http-method-override": "GET",
        "x-forwarded-prefix": "/health",
    }  # fmt: skip
    for door, path in ((control, "/metrics"), (control, "/admin/api/overview"), (gateway, "/v1/models")):
        async with door.client() as client:
            answer = await client.get(path, headers=lies)
        assert answer.status_code == 401
        assert "127.0.0.1" not in answer.text


# --- cross-origin -----------------------------------------------------------------------------------------

PAGE = "https://app.example.com"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.fixture
def crossed(tokenizer: Tokenizer, metrics: Metrics, store: KeyFile) -> Callable[..., FastAPI]:
    def make(*origins: str) -> FastAPI:
        config = ClusterConfig.model_validate({"gateway": {"host": "0.0.0.0", "cors_origins": list(origins)}})
        streams = ScriptedStreams(spell(tokenizer, "x"))
        return build_app(config, streams, tokenizer, metrics, max_context=MAX_CONTEXT, keys=store)

    return make


async def test_no_page_may_call_unless_it_is_named(crossed: Callable[..., FastAPI], store: KeyFile) -> None:
    """By default no answer has a header that would let one read it, and a preflight is a request without a key."""
    _, text = store.create("ci")
    for origins, origin in (((), PAGE), ((PAGE,), "https://evil.example"), ((PAGE,), "null"),
                            ((PAGE,), f"{PAGE}.evil.example"), ((PAGE,), PAGE.replace("https", "http"))):  # fmt: skip
        async with client_of(crossed(*origins), base="http://gateway", origin=origin) as client:
            asked = await client.options("/v1/completions", headers=PREFLIGHT)
            answer = await client.post(
                "/v1/completions", json=TEXT, headers={"authorization": f"Bearer {text}"}
            )
        assert asked.status_code == 401
        for one in (asked, answer):
            assert not [name for name in one.headers if name.startswith("access-control")]


async def test_a_page_that_is_named_may_call_with_a_key(
    crossed: Callable[..., FastAPI], store: KeyFile
) -> None:
    """Its browser asks first, without the key; refusals can be read too; cookies are never asked for."""
    _, text = store.create("ci")
    async with client_of(
        crossed("http://other.example:3000", PAGE), base="http://gateway", origin=PAGE
    ) as client:
        asked = await client.options("/v1/completions", headers=PREFLIGHT)
        bare = await client.options("/v1/completions")
        refused = await client.post("/v1/completions", json=TEXT)
        answer = await client.post(
            "/v1/completions", json={**TEXT, "stream": True}, headers={"authorization": f"Bearer {text}"}
        )
        twice = await client.get(
            "/v1/models", headers=[(b"origin", PAGE.encode()), (b"origin", b"https://evil.example")]
        )

    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, PAGE)
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert (bare.status_code, refused.status_code, answer.status_code) == (401, 401, 200)
    for one in (asked, refused, answer):
        assert one.headers["access-control-allow-origin"] == PAGE
        assert "origin" in one.headers["vary"].lower()
        assert "access-control-allow-credentials" not in one.headers
    assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in twice.headers


# --- secrets and logs -------------------------------------------------------------------------------------


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Everything that a process writes to its log, in the form it really has."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    before = structlog.get_config()
    configure_logs("gateway")
    yield stream
    logging.getLogger().removeHandler(handler)
    structlog.contextvars.clear_contextvars()
    structlog.configure(**before)


@pytest.fixture
async def talked(
    gateway: Door, control: Door, metrics: Metrics, store: KeyFile, logged: io.StringIO
) -> AsyncIterator[tuple[str, list[str]]]:
    """All that is written and told of a day with all kinds of keys; and the secrets that must not be there."""
    secrets = [key[-30:] for key in (*gateway.wrong, gateway.right, *control.wrong, KEY)]
    told: list[httpx.Response] = []
    for door in (gateway, control):
        for key in (door.right, *door.wrong):
            async with door.client(key) as client:
                for method, path in sorted(routes_of(door.app)):
                    if "events" not in path and "session" not in path:
                        body = {"json": TEXT} if method == "POST" and path.startswith("/v1") else {}
                        told.append(await client.request(method, concrete(path), **body))
                told.append(await client.get("/v1/models", params={"api_key": key}))
                told.append(await client.post("/admin/api/session", json={"key": key}))
                told.append(await client.post("/v1/completions", content=b"{" + key.encode()))
    async with control.client(KEY) as client:
        told.append(await client.get("/admin/api/audit"))
        told.append(await client.post("/admin/api/keys", json={"name": 'x"}\r\n{"event": "forged"}'}))
        told.append(
            await client.post("/admin/api/actions/pause", json={"reason": "a\nb", "confirm": "c\u2028d"})
        )
    answers = [str(dict(one.headers)) + one.text for one in told if "/openapi" not in str(one.url)]
    yield "\n".join([logged.getvalue(), metrics.text().decode(), *answers, store.path.read_text()]), secrets


async def test_secrets_are_in_no_log_metric_answer_or_file(
    talked: tuple[str, list[str]], logged: io.StringIO
) -> None:
    """Whatever was done with right and wrong keys."""
    everything, secrets = talked
    assert len(everything) > 5000 and len(secrets) >= 8
    assert "admin" in logged.getvalue(), "something was logged at all"

    assert [secret for secret in secrets if secret in everything] == []


async def test_every_line_of_the_log_is_one_event(talked: tuple[str, list[str]], logged: io.StringIO) -> None:
    """JSON keeps line ends inside strings: nobody writes a line of their own into it."""
    lines = logged.getvalue().splitlines()

    assert len(lines) > 3
    for line in lines:
        assert json.loads(line)["event"] != "forged"
