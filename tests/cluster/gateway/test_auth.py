"""API keys at the gateway: every route but the probes, 401 in OpenAI's shape, and nothing of a key in any log."""

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import openai
import pytest
import structlog.testing

from paceline.cluster.gateway.fakes import ScriptedStreams
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.keys import KeyFile
from paceline.cluster.metrics import Metrics
from scripted_gateway import TEXT, client_for, error_of, inside, listening, spell


@pytest.fixture
def store(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json", recheck_s=0.0)


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as events:
        yield events


async def test_the_real_client_works_with_a_key_and_not_without(
    tokenizer: Tokenizer, metrics: Metrics, store: KeyFile
) -> None:
    """Created and revoked while the gateway runs."""
    streams = ScriptedStreams(spell(tokenizer, "x"))
    async with listening(tokenizer, metrics, streams, store) as url:
        async with client_for(url, "pl_wrong") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.completions.create(**TEXT)
        key, text = store.create("ci")
        async with client_for(url, text) as client:
            answer = await client.completions.create(**TEXT)
            store.revoke(key.id)
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(**TEXT)

    assert (caught.value.code, caught.value.status_code) == ("invalid_api_key", 401)
    assert "pl_wrong" not in str(caught.value)
    assert answer.choices[0].text == "x"
    assert len(streams.requests) == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/x"),
     ("GET", "/openapi.json"), ("GET", "/nowhere"), ("PUT", "/health/"), ("GET", "//health")],
)  # fmt: skip
async def test_every_route_needs_a_key_known_or_not(
    tokenizer: Tokenizer, metrics: Metrics, store: KeyFile, method: str, path: str
) -> None:
    """Before anything of the request is read."""
    async with inside(tokenizer, metrics, ScriptedStreams([]), store) as client:
        refused = await client.request(method, f"http://gateway{path}", content=b"{")

    assert error_of(refused, 401)["type"] == "invalid_request_error"
    assert refused.headers["www-authenticate"] == "Bearer"


async def test_probes_need_no_key(tokenizer: Tokenizer, metrics: Metrics, store: KeyFile) -> None:
    """Kubernetes has none."""
    async with inside(tokenizer, metrics, ScriptedStreams([]), store) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200


async def test_header_tricks_do_not_open_the_door(
    tokenizer: Tokenizer, metrics: Metrics, store: KeyFile, logged: list[MutableMapping[str, Any]]
) -> None:
    """Schemes are read in any case, as HTTP has it; two headers are one too many."""
    _, text = store.create("ci")
    right = f"Bearer {text}"
    async with inside(tokenizer, metrics, ScriptedStreams(spell(tokenizer, "x")), store) as client:
        for values in (
            [b""],
            [b"Bearer"],
            [b"Bearer "],
            [text.encode()],
            [b"Basic " + text.encode()],
            [right.encode(), b"Bearer x"],
            [b"Bearer x", right.encode()],
            [f"Bearer {text}, Bearer {text}".encode()],
            [b"Bearer \xff\x00"],
            [b"Bearer " + b"x" * 10000],
        ):
            headers = [(b"authorization", value) for value in values]
            refused = await client.get("/v1/models", headers=headers)
            assert error_of(refused, 401)["code"] == "invalid_api_key"
        assert (
            await client.get("/v1/models", headers={"authorization": f"bEARER  {text} "})
        ).status_code == 200
        assert (await client.get("/v1/models", headers={"authorization": right})).status_code == 200

    assert text[16:] not in str(logged)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("localhost", True), ("LOCALHOST:8000", True), ("127.0.0.1:8000", True), ("[::1]:8000", True), ("[::1]", True),
     ("evil.example", False), ("evil.example:8000", False), ("127.0.0.1.evil.example", False), ("10.0.0.1", False),
     ("localhost.evil.example", False), ("", False), ("localhost\n", False), ("127.0.0.1:8000:1", False)],
)  # fmt: skip
async def test_a_listener_without_keys_answers_to_this_machine_s_names_only(
    tokenizer: Tokenizer, metrics: Metrics, store: KeyFile, host: str, is_local: bool
) -> None:
    """A web page may have its own name stand for 127.0.0.1. Probes, keys and an open door by configuration need no name."""
    headers = {"host": host}
    async with inside(tokenizer, metrics, ScriptedStreams(spell(tokenizer, "x"))) as client:
        paths = ("/v1/models", "/openapi.json", "/nowhere")
        answers = [await client.get(path, headers=headers) for path in paths]
        answers.append(await client.post("/v1/completions", json=TEXT, headers=headers))
        probe = await client.get("/health", headers=headers)
    async with inside(tokenizer, metrics, ScriptedStreams([]), auth="none") as client:
        opened = await client.get("/v1/models", headers=headers)
    async with inside(tokenizer, metrics, ScriptedStreams([]), store) as client:
        keyed = await client.get("/v1/models", headers=headers)

    assert [answer.status_code for answer in answers] == ([200, 200, 404, 200] if is_local else [421] * 4)
    assert is_local or error_of(answers[0], 421)["code"] == "misdirected_request"
    assert (probe.status_code, opened.status_code, keyed.status_code) == (200, 200, 401)


async def test_an_unreadable_store_lets_nobody_in(
    tokenizer: Tokenizer, metrics: Metrics, store: KeyFile
) -> None:
    """503, since it is not the client's fault, and it is told to come again."""
    _, text = store.create("ci")
    store.path.write_bytes(b"{")
    async with inside(tokenizer, metrics, ScriptedStreams([]), store) as client:
        refused = await client.get("/v1/models", headers={"authorization": f"Bearer {text}"})

    assert error_of(refused, 503)["code"] == "unavailable"
    assert str(store.path) not in refused.text


async def test_keys_do_not_share_prefixes(tokenizer: Tokenizer, metrics: Metrics, store: KeyFile) -> None:
    """The time to the first token must not tell one what another asked. Without keys the salt is the client's."""
    streams = ScriptedStreams(spell(tokenizer, "x"))
    keys = [store.create(name) for name in ("a", "b")]
    async with inside(tokenizer, metrics, streams, store) as client:
        for _, text in keys:
            headers = {"authorization": f"Bearer {text}"}
            for salt in ("", "s"):
                await client.post("/v1/completions", json={**TEXT, "cache_salt": salt}, headers=headers)
    async with inside(tokenizer, metrics, streams) as client:
        await client.post("/v1/completions", json={**TEXT, "cache_salt": "s"})

    salts = [request.cache_salt for request in streams.requests]
    assert len(set(salts)) == 5
    assert salts[4] == "s"
