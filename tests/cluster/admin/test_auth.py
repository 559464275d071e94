"""Every way past the admin API's guard that we know of, tried: none may lead in."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog.testing
from fastapi import FastAPI

from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.admin.auth import Authority
from paceline.cluster.admin.bundle import Bundle
from paceline.cluster.admin.key import AdminKey, ensure_admin_key, hash_key, read_admin_key
from paceline.cluster.admin.sessions import IDLE_S, MAX_AGE_S, Attempts, Sessions
from paceline.cluster.control import Control
from paceline.cluster.errors import ConfigError
from scripted_admin import KEY, LOCAL, ScriptedLoop, client_of, wrong_key

API = "/admin/api"
SESSION = f"{API}/session"
PAUSE = f"{API}/actions/pause"
ORIGIN = {"origin": LOCAL}


class Clock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of sessions and attempts; to be asked for before the application is built."""
    clock = Clock()
    original = Authority.__init__

    def with_clock(self: Authority, *given: Any, **named: Any) -> None:
        original(self, *given, **{**named, "clock": clock})

    monkeypatch.setattr(Authority, "__init__", with_clock)
    return clock


def code_of(answer: httpx.Response) -> str:
    """The code of an error, whose shape is checked on the way."""
    error = answer.json()["error"]
    assert error.keys() == {"code", "message", "action", "field"} and error["message"] and error["action"]
    return str(error["code"])


async def sign_in(client: httpx.AsyncClient) -> httpx.Response:
    answer = await client.post(SESSION, json={"key": KEY}, headers=ORIGIN)
    assert answer.status_code == 200, answer.text
    return answer


async def audit(operator: httpx.AsyncClient) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await operator.get(f"{API}/audit")).json()["items"]
    return rows


# --- the key ----------------------------------------------------------------------------------------------


async def test_without_a_key_nothing_is_told_but_what_is_named(
    stranger: httpx.AsyncClient, app: FastAPI
) -> None:
    """Default-deny: every path, known or not, is closed unless it is in this list."""
    is_open = {"/health", "/metrics", f"{API}/status"}
    paths = [
        *app.openapi()["paths"],
        f"{API}/events",
        f"{API}/openapi.json",
        f"{API}/nothing",
        "/nothing",
        "/docs",
    ]

    for path in paths:
        answer = await stranger.get(path.replace("{", "").replace("}", ""))
        assert answer.status_code == 401 and code_of(answer) == "not_signed_in", path
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in is_open:
        assert (await stranger.get(path)).status_code == 200, path


async def test_where_others_reach_control_only_the_probe_is_open(
    make_control: Callable[..., Control],
) -> None:
    """Metrics and status tell of workers and models, which is nobody's business out there."""
    app = build_admin_app(make_control("control.host=0.0.0.0"), hash_key(KEY))
    async with client_of(app, base="http://control.example:8001", address="10.0.0.9") as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/metrics", f"{API}/status", f"{API}/overview"):
            assert (await client.get(path)).status_code == 401, path
        client.headers["authorization"] = f"Bearer {KEY}"
        for path in ("/metrics", f"{API}/status", f"{API}/overview"):
            assert (await client.get(path)).status_code == 200, path


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, f"Bearer {KEY.upper()}", "Bearer \x80"],
)  # fmt: skip
async def test_what_is_not_exactly_the_key_is_refused(stranger: httpx.AsyncClient, header: str) -> None:
    """Nor does the answer repeat it."""
    answer = await stranger.get(f"{API}/overview", headers={"authorization": header.encode("latin-1")})

    assert answer.status_code == 401 and code_of(answer) == "wrong_admin_key"
    assert KEY[:20] not in answer.text


async def test_two_authorization_headers_are_none(stranger: httpx.AsyncClient) -> None:
    """A proxy and we might each look at another one."""
    headers = [("authorization", f"Bearer {wrong_key()}"), ("authorization", f"Bearer {KEY}")]
    assert (await stranger.get(f"{API}/overview", headers=headers)).status_code == 401


async def test_without_an_admin_key_nobody_gets_in(make_control: Callable[..., Control]) -> None:
    """An empty hash is the hash of nothing, not of an empty key."""
    app = build_admin_app(make_control(), b"")
    async with client_of(app) as client:
        for key in ("", KEY, "\0" * 32):
            answer = await client.get(f"{API}/overview", headers={"authorization": f"Bearer {key}".encode()})
            assert answer.status_code == 503 and code_of(answer) == "no_admin_key"
        assert (await client.post(SESSION, json={"key": "x"}, headers=ORIGIN)).status_code == 503
    assert not AdminKey(b"").matches("")


@pytest.mark.parametrize("name", ["key", "api_key", "access_token", "Token", "PASSWORD"])
async def test_a_key_in_the_address_is_refused_even_with_a_right_one_beside_it(
    operator: httpx.AsyncClient, name: str
) -> None:
    """Addresses are logged and kept; whoever sends one so must learn of it at once."""
    answer = await operator.get(f"{API}/overview?{name}={KEY}")

    assert answer.status_code == 400 and code_of(answer) == "key_in_url"
    assert KEY not in answer.text


async def test_wrong_keys_run_out_and_then_the_right_one_waits_too(
    clock: Clock, make_control: Callable[..., Control]
) -> None:
    """Brute force: ten at once, then one in six seconds, by address; open sessions go on meanwhile."""
    app = build_admin_app(make_control(), hash_key(KEY))
    async with client_of(app) as signed_in, client_of(app) as guesser, client_of(app, address="::1") as other:
        await sign_in(signed_in)
        for _ in range(5):
            wrong = {"authorization": f"Bearer {wrong_key()}"}
            assert (await guesser.get(f"{API}/overview", headers=wrong)).status_code == 401
            answer = await guesser.post(SESSION, json={"key": wrong_key()}, headers=ORIGIN)
            assert answer.status_code == 401
        right = {"authorization": f"Bearer {KEY}"}
        answer = await guesser.get(f"{API}/overview", headers=right)
        assert answer.status_code == 429 and code_of(answer) == "too_many_wrong_keys"
        assert int(answer.headers["retry-after"]) == 6
        forged = {"x-forwarded-for": "9.9.9.9", "forwarded": "for=9.9.9.9", **right}
        assert (await guesser.get(f"{API}/overview", headers=forged)).status_code == 429
        assert (await other.get(f"{API}/overview", headers=right)).status_code == 200
        assert (await signed_in.get(f"{API}/overview")).status_code == 200
        clock.now += 6.1
        assert (await guesser.get(f"{API}/overview", headers=right)).status_code == 200


def test_who_has_an_ipv6_network_has_one_address() -> None:
    """Or 2^64 addresses would each have ten tries. What is remembered is bounded."""
    clock = Clock()
    authority = Authority(AdminKey(hash_key(KEY)), is_local=False, clock=clock)
    for place in range(10):
        with pytest.raises(Exception, match="not valid"):
            authority.check_key("wrong", f"2001:db8::{place:x}")
    with pytest.raises(Exception, match="too many wrong keys"):
        authority.check_key(KEY, "2001:db8::ffff")
    authority.check_key(KEY, "2001:db8:0:1::1")
    attempts = Attempts(clock, burst=1, every_s=1.0)
    for place in range(10_000):
        attempts.take(str(place))
    assert len(attempts._debts) <= 4096


# --- sessions ---------------------------------------------------------------------------------------------


async def test_a_session_s_cookie_is_out_of_reach_of_scripts_and_other_sites(
    stranger: httpx.AsyncClient, make_control: Callable[..., Control]
) -> None:
    """HttpOnly, SameSite=Strict, 256 bits; Secure and bound to the host wherever others reach Control."""
    cookie = (await sign_in(stranger)).headers["set-cookie"]

    assert re.match(r"paceline_admin_8001=[\w-]{43}; ", cookie)
    assert {"HttpOnly", "SameSite=strict", "Path=/admin"} <= set(
        cookie.split("; ")
    ) and "Secure" not in cookie
    app = build_admin_app(make_control("control.host=0.0.0.0"), hash_key(KEY))
    async with client_of(app, base="https://control.example") as client:
        answer = await client.post(SESSION, json={"key": KEY}, headers={"origin": "https://control.example"})
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("__Host-paceline_admin=") and "Domain" not in cookie
        assert {"HttpOnly", "SameSite=strict", "Path=/", "Secure"} <= set(cookie.split("; "))
        assert (await client.get(SESSION)).status_code == 200


async def test_a_session_name_from_outside_is_never_taken_up(stranger: httpx.AsyncClient) -> None:
    """Fixation: who plants a cookie before somebody signs in has nothing afterwards."""
    planted = "A" * 43
    stranger.cookies.set("paceline_admin_8001", planted)
    assert (await stranger.get(SESSION)).status_code == 401

    answer = await sign_in(stranger)

    assert planted not in answer.headers["set-cookie"]
    stranger.cookies.clear()
    stranger.cookies.set("paceline_admin_8001", planted)
    assert (await stranger.get(SESSION)).status_code == 401


async def test_signing_in_again_ends_the_session_before(stranger: httpx.AsyncClient, app: FastAPI) -> None:
    """Each sign-in has a new name and a new token."""
    await sign_in(stranger)
    old = dict(stranger.cookies)
    await sign_in(stranger)

    assert dict(stranger.cookies) != old
    async with client_of(app) as thief:
        thief.cookies.update(old)
        assert (await thief.get(SESSION)).status_code == 401


async def test_a_session_ends_when_idle_when_old_and_when_signed_out(
    clock: Clock, make_control: Callable[..., Control]
) -> None:
    """On the server's side: the cookie itself still being sent changes nothing."""
    app = build_admin_app(make_control(), hash_key(KEY))
    async with client_of(app) as client:
        await sign_in(client)
        for _ in range(30):  # use keeps it open, for a while
            clock.now += IDLE_S * 0.5
            if (await client.get(SESSION)).status_code == 401:
                break
        assert clock.now - 1000 == pytest.approx(MAX_AGE_S, abs=IDLE_S)
        await sign_in(client)
        clock.now += IDLE_S + 1
        assert (await client.get(SESSION)).status_code == 401
        token = (await sign_in(client)).json()["csrf"]
        kept = dict(client.cookies)
        answer = await client.delete(SESSION, headers={**ORIGIN, "x-csrf-token": token})
        assert answer.status_code == 204 and not client.cookies
        client.cookies.update(kept)
        assert (await client.get(SESSION)).status_code == 401


def test_there_are_only_so_many_sessions() -> None:
    """The one that was not used for longest goes."""
    clock = Clock()
    sessions = Sessions(clock)
    first, cookie = sessions.open("a")
    for _ in range(64):
        clock.now += 1
        sessions.open("a")

    assert sessions.find(cookie) is None and not sessions.is_alive(first)


# --- other people's pages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "wrong", "\x80", "of another session"])
async def test_a_session_s_change_without_its_token_is_refused(
    browser: httpx.AsyncClient,
    app: FastAPI,
    operator: httpx.AsyncClient,
    token: str | None,
    loop: ScriptedLoop,
) -> None:
    """CSRF: the cookie alone proves only which browser it is."""
    if token == "of another session":
        async with client_of(app) as other:
            token = str((await sign_in(other)).json()["csrf"])
    browser.headers.pop("x-csrf-token")
    headers = {} if token is None else {"x-csrf-token": token.encode("latin-1")}

    answer = await browser.post(PAUSE, json={}, headers=headers)

    assert answer.status_code == 403
    assert code_of(answer) == ("csrf_missing" if token is None else "csrf_wrong")
    assert loop.calls == []
    (row,) = [row for row in await audit(operator) if row["action"] == "pause"]
    assert row["who"].startswith("session:") and not row["ok"] and row["address"] == "127.0.0.1"


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://localhost:8000", "https://localhost:8001", "null", "http://localhost.evil.example:8001",
     "http://localhost:8001.evil.example", "http://127.0.0.1:8001", "", "file://", "http://[::1"],
)  # fmt: skip
async def test_a_foreign_page_changes_nothing(
    browser: httpx.AsyncClient, stranger: httpx.AsyncClient, operator: httpx.AsyncClient, origin: str
) -> None:
    """Not with the cookie, not with the token, not with the key, and it cannot sign in either. Another port is foreign.

    A scheme that differs alone is not: a proxy that adds TLS does that.
    """
    is_foreign = origin != "https://localhost:8001"
    for client, request in (
        (browser, (PAUSE, {})),
        (operator, (PAUSE, {})),
        (stranger, (SESSION, {"key": KEY})),
    ):
        answer = await client.post(request[0], json=request[1], headers={"origin": origin})
        if is_foreign:
            assert answer.status_code == 403 and code_of(answer) == "foreign_origin"
            assert "access-control-allow-origin" not in answer.headers


async def test_a_session_without_an_origin_is_no_browser(browser: httpx.AsyncClient) -> None:
    """Browsers say where a change comes from; Sec-Fetch-Site is believed when it says no."""
    del browser.headers["origin"]
    answer = await browser.post(PAUSE, json={})
    assert answer.status_code == 403 and code_of(answer) == "origin_missing"
    headers = {**ORIGIN, "sec-fetch-site": "cross-site"}
    assert code_of(await browser.post(PAUSE, json={}, headers=headers)) == "foreign_origin"
    assert (await browser.post(PAUSE, json={}, headers=ORIGIN)).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "0.0.0.0", "10.0.0.1:8001", "", "127.0.0.1.evil"]
)
async def test_on_loopback_only_loopback_s_names_are_answered(browser: httpx.AsyncClient, host: str) -> None:
    """DNS rebinding: a page whose own name was made to stand for 127.0.0.1 sends that name as Host."""
    for path in ("/", "/admin/", "/health", "/metrics", f"{API}/status", f"{API}/overview", SESSION):
        answer = await browser.get(path, headers={"host": host})
        assert answer.status_code == 421 and code_of(answer) == "misdirected_request", path


@pytest.mark.parametrize("host", ["localhost", "localhost:8001", "127.0.0.1:1", "[::1]:8001", "LOCALHOST"])
async def test_loopback_s_own_names_are_answered(stranger: httpx.AsyncClient, host: str) -> None:
    """Control for the test above, and for forwarded ports."""
    assert (await stranger.get("/health", headers={"host": host})).status_code == 200


async def test_no_preflight_is_answered(stranger: httpx.AsyncClient) -> None:
    """So no foreign page gets to send JSON at all."""
    asks = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = await stranger.options(PAUSE, headers=asks)

    assert answer.status_code in (401, 405) and "access-control-allow-origin" not in answer.headers


# --- what is sent and what comes back ---------------------------------------------------------------------


async def test_a_form_is_not_json(browser: httpx.AsyncClient) -> None:
    """What a foreign page can send without asking first is text or a form."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = await browser.post(PAUSE, content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 415 and code_of(answer) == "unsupported_media_type"


async def test_large_bodies_are_not_read(browser: httpx.AsyncClient, stranger: httpx.AsyncClient) -> None:
    """Announced or in pieces, by whomever."""

    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 10_000

    kind = {"content-type": "application/json"}
    assert (await browser.post(PAUSE, content=b" " * 100_000, headers=kind)).status_code == 413
    assert (await stranger.post(SESSION, content=endless(), headers=kind)).status_code == 413


async def test_every_answer_carries_the_strict_headers(
    stranger: httpx.AsyncClient, operator: httpx.AsyncClient
) -> None:
    """Errors and the page of a missing bundle too: nobody frames us, no script but ours runs, nothing is kept."""
    answers = [
        await stranger.get("/admin/"),
        await stranger.get(f"{API}/overview"),
        await operator.get(f"{API}/overview"),
        await operator.get(f"{API}/versions/none"),
        await stranger.get("/health", headers={"host": "evil.example"}),
        await stranger.post(SESSION, content=b"{", headers={"content-type": "application/json"}),
    ]

    assert [answer.status_code for answer in answers] == [503, 401, 200, 404, 421, 422]
    for answer in answers:
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["script-src"] == policy["style-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["object-src"] == policy["base-uri"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"


async def test_the_key_is_nowhere_but_where_it_was_sent(
    stranger: httpx.AsyncClient, operator: httpx.AsyncClient, app: FastAPI
) -> None:
    """Not in logs, not in the audit trail, not in answers: neither the right one nor a wrong one."""
    wrong = wrong_key()
    with structlog.testing.capture_logs() as logs:
        await sign_in(stranger)
        await stranger.post(SESSION, json={"key": wrong}, headers=ORIGIN)
        rows = (await operator.get(f"{API}/audit")).text

    for text in (str(logs), rows):
        assert KEY not in text and wrong not in text and text


async def test_sign_ins_are_audited_with_who_and_from_where(
    stranger: httpx.AsyncClient, operator: httpx.AsyncClient
) -> None:
    """Right and wrong ones, and sign-outs."""
    token = (await sign_in(stranger)).json()["csrf"]
    await stranger.post(SESSION, json={"key": wrong_key()}, headers=ORIGIN)
    await stranger.delete(SESSION, headers={**ORIGIN, "x-csrf-token": token})

    rows = await audit(operator)

    assert [row["action"] for row in rows] == ["sign_out", "sign_in_failed", "sign_in"]
    assert [row["ok"] for row in rows] == [True, False, True]
    assert {row["address"] for row in rows} == {"127.0.0.1"}
    assert rows[0]["who"] == rows[2]["who"] != rows[1]["who"]


async def test_strangers_cannot_fill_the_audit_trail(
    clock: Clock, make_control: Callable[..., Control]
) -> None:
    """Refusals of people without a session are kept up to a number, by address; after that they are logged only."""
    app = build_admin_app(make_control(), hash_key(KEY))
    async with client_of(app) as stranger, client_of(app, authorization=f"Bearer {KEY}") as operator:
        for _ in range(200):
            assert (await stranger.post(PAUSE, json={})).status_code == 401
        assert 0 < (await operator.get(f"{API}/audit")).json()["total"] <= 31


# --- the key's file ---------------------------------------------------------------------------------------


def test_the_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    """The next start finds it."""
    path = tmp_path / "home" / "admin.key"

    key = ensure_admin_key(path)

    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == key + "\n"
    assert ensure_admin_key(path) == read_admin_key(path) == key
    assert len(key) > 40 and [file.name for file in path.parent.iterdir()] == ["admin.key"]


def test_a_key_file_that_others_read_is_refused(tmp_path: Path) -> None:
    """As ssh does it: what others may have read is no secret."""
    path = tmp_path / "admin.key"
    ensure_admin_key(path)
    path.chmod(0o640)

    with pytest.raises(ConfigError, match="its mode is 640, expected 600"):
        ensure_admin_key(path)


def test_the_environment_s_key_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is written then; one that can be guessed is none."""
    path = tmp_path / "admin.key"
    monkeypatch.setenv("PACELINE_ADMIN_KEY", KEY)
    assert ensure_admin_key(path) == KEY and not path.exists()
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "secret")
    with pytest.raises(ConfigError, match="24 to 512") as caught:
        ensure_admin_key(path)
    assert "secret" not in str(caught.value)


def test_a_process_keeps_only_the_hash() -> None:
    """And what names the key in the audit trail does not help to guess it."""
    key = AdminKey(hash_key(KEY))

    assert key.matches(KEY) and not key.matches(KEY + " ")
    assert KEY not in repr(vars(key)) and hash_key(KEY).hex()[:8] != key.id


def test_the_missing_bundle_s_page_says_what_to_do(tmp_path: Path) -> None:
    """It has no script and no style of its own."""
    assert not (tmp_path / "static").exists()
    assert Bundle(tmp_path / "static")._files == {}
