"""A broken connection: the same request with the last event's id goes on where it was cut, whatever the chunks were."""

import itertools
import json
import random
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cluster.errors import RequestError
from paceline.cluster.gateway.fakes import ScriptedStreams, say
from paceline.cluster.gateway.resume import Cursor, LastEvent, Place, parse_last_event
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Request
from scripted_gateway import CHAT, EOS, NEVER, TEXT, error_of, inside, scored, spell

SSE = {"accept": "text/event-stream"}
SAID = ["né 😀 über STO, then STOP it", "zwei", "drei 🦊🦊 Füchse und mehr"]
Event = tuple[str, dict[str, Any]]


def chunked(tokenizer: Tokenizer, seed: int) -> ScriptedStreams:
    """The same texts for everyone, cut into events by chance."""
    chance = random.Random(seed)

    def script(request: Request) -> Any:
        ids = [*tokenizer.encode(SAID[request.sampling.choice % len(SAID)]), EOS]
        groups, at = [], 0
        while at < len(ids):
            size = chance.randint(1, 6)
            groups.append(ids[at : at + size])
            at += size
        events = say(*groups, *([] if chance.random() < 0.5 else [()]))
        if request.logprobs is None:
            return events
        return [scored(event, request.logprobs) for event in events]

    return ScriptedStreams(script)


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], last: str = ""
) -> tuple[list[Event], bool]:
    """(id, data) of each event; whether [DONE] came."""
    headers = {**SSE, **({"last-event-id": last} if last else {})}
    response = await client.post(path, json={**body, "stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    events: list[Event] = []
    for block in response.text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if lines.get("data") == "[DONE]":
            return events, True
        if "data" in lines:
            events.append((lines["id"], json.loads(lines["data"])))
    return events, False


def told(events: list[Event]) -> dict[str, Any]:
    """What a client puts together: text, scores, ids, roles and ends of each choice, and the usage."""
    whole: dict[str, Any] = {"usage": None}
    for _, data in events:
        whole["usage"] = data.get("usage") or whole["usage"]
        for choice in data["choices"]:
            mine = whole.setdefault(
                choice["index"], {"text": "", "roles": 0, "ends": [], "scores": [], "ids": []}
            )
            delta = choice.get("delta", {"content": choice.get("text")})
            mine["text"] += delta.get("content") or ""
            mine["roles"] += "role" in delta
            mine["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            mine["ids"] += choice.get("token_ids") or []
            scores = choice["logprobs"] or {}
            mine["scores"] += scores.get("token_logprobs") or [
                item["logprob"] for item in scores.get("content") or []
            ]
    return whole


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 3, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "stop": ["STOP"]}),
    ("/v1/completions", {**TEXT, "n": 3, "logprobs": 1, "return_token_ids": True, "max_tokens": 100}),
    ("/v1/completions", {**TEXT, "echo": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {**TEXT, "stop": ["STOP"], "include_stop_str_in_output": True}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_cut_anywhere_goes_on_without_losing_or_repeating_a_character(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    """Behind every single event, on another gateway, whose chunks are different ones."""
    body = {**body, "seed": 7}
    async with inside(tokenizer, Metrics(), chunked(tokenizer, 1)) as first:
        events, is_done = await stream(first, path, body)
    assert is_done
    assert told(events)[0]["text"]

    for cut in range(1, len(events) + 1):
        metrics = Metrics()
        async with inside(tokenizer, metrics, chunked(tokenizer, 1000 + cut)) as other:
            rest, is_done = await stream(other, path, body, last=events[cut - 1][0])
        assert is_done
        assert told([*events[:cut], *rest]) == told(events)
        assert metrics.registry.get_sample_value("paceline_streams_resumed_total") == 1


async def test_a_stream_can_be_cut_again_and_again(tokenizer: Tokenizer) -> None:
    """Ids of a continued stream are as good as those of the first."""
    body = {**CHAT, "n": 2, "seed": 7, "logprobs": True, "stream_options": {"include_usage": True}}
    kept: list[Event] = []
    for attempt in itertools.count():
        async with inside(tokenizer, Metrics(), chunked(tokenizer, attempt)) as client:
            events, _ = await stream(client, "/v1/chat/completions", body, kept[-1][0] if kept else "")
        if not events:
            break
        kept += events[:2]

    async with inside(tokenizer, Metrics(), chunked(tokenizer, 99)) as client:
        whole, _ = await stream(client, "/v1/chat/completions", body)
    assert attempt > 5
    assert told(kept) == told(whole)


async def test_whoever_has_everything_gets_the_end_without_any_work(tokenizer: Tokenizer) -> None:
    """No stream is started for it."""
    for options in ({"include_usage": True}, {}):
        body = {**TEXT, "seed": 1, "stream_options": options}
        async with inside(tokenizer, Metrics(), chunked(tokenizer, 1)) as client:
            events, _ = await stream(client, "/v1/completions", body)
        streams = ScriptedStreams([NEVER])
        async with inside(tokenizer, Metrics(), streams) as client:
            rest, is_done = await stream(client, "/v1/completions", body, events[-1][0])

        assert (rest, is_done, streams.requests) == ([], True, [])


async def test_events_have_ids_for_clients_that_read_event_streams_only(tokenizer: Tokenizer) -> None:
    """Widespread benchmark clients take every line for data, and no OpenAI client can use the ids."""
    async with inside(tokenizer, Metrics(), chunked(tokenizer, 1)) as client:
        plain = await client.post("/v1/completions", json={**TEXT, "stream": True})

    assert all(line.startswith("data: ") for line in plain.text.split("\n") if line)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 8},
        {"prompt": "ho"},
        {"stop": ["x"]},
        {"n": 2},
        {"temperature": 0.5},
        {"max_tokens": 3},
        {"logprobs": 1},
    ],
)
async def test_another_request_is_not_continued(tokenizer: Tokenizer, change: dict[str, Any]) -> None:
    """Two texts must never be spliced."""
    body = {**TEXT, "seed": 7, "stream": True}
    async with inside(tokenizer, Metrics(), chunked(tokenizer, 1)) as client:
        events, _ = await stream(client, "/v1/completions", body)
        headers = {"last-event-id": events[0][0]}
        refused = await client.post("/v1/completions", json={**body, **change}, headers=headers)
        speculation = {**body, "speculation": False, "priority": 3}
        same = await client.post("/v1/completions", json=speculation, headers=headers)

    assert error_of(refused, 400)["code"] == "last_event_id_mismatch"
    assert "x-paceline-seed" in refused.text
    assert same.status_code == 200


async def test_a_text_that_changed_is_not_continued(tokenizer: Tokenizer) -> None:
    """Other weights behind the same name: the checksum of what the client has says no."""
    body = {**TEXT, "seed": 7, "stream": True}
    async with inside(tokenizer, Metrics(), ScriptedStreams(spell(tokenizer, "one two three"))) as client:
        events, _ = await stream(client, "/v1/completions", body)
    headers = {"last-event-id": events[6][0]}
    for text in ("one twX three", "one"):
        async with inside(tokenizer, Metrics(), ScriptedStreams(spell(tokenizer, text))) as client:
            changed = await client.post("/v1/completions", json=body, headers=headers)

        assert error_of(changed, 409)["code"] == "cannot_continue"


@pytest.mark.parametrize(
    "id", ["0", "x" * 5000, "0123456789abcdef:1", "0123456789abcdef:1.2.zz", "é".encode().decode("latin-1")]
)
async def test_an_id_of_somebody_else_is_refused(tokenizer: Tokenizer, id: str) -> None:
    """With a 400 that names the header."""
    async with inside(tokenizer, Metrics(), chunked(tokenizer, 1)) as client:
        headers = [(b"last-event-id", id.encode("latin-1")), (b"content-type", b"application/json")]
        content = msgspec.json.encode({**TEXT, "stream": True})
        refused = await client.post("/v1/completions", content=content, headers=headers)

    assert error_of(refused, 400)["param"] == "last-event-id"


places = st.builds(
    Place,
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 2**32 - 1),
    st.just(True),
    st.booleans(),
) | st.just(Place())


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(places, min_size=1, max_size=64), st.booleans())
def test_ids_read_back_as_they_were_written(written: list[Place], is_end: bool) -> None:
    """And they fit into a header."""
    cursor = Cursor(len(written), "0123456789abcdef", LastEvent("0123456789abcdef", tuple(written), False))
    id = cursor.event_id(is_end=is_end)

    assert parse_last_event(id) == LastEvent("0123456789abcdef", tuple(written), is_end)


@given(st.text(max_size=60))
def test_any_other_text_is_refused(text: str) -> None:
    """Never with anything but a RequestError."""
    with pytest.raises(RequestError):
        parse_last_event(text)
