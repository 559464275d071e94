"""The whole API on a real cluster, by real clients: OpenAI's for Python and for Node, and a raw one that resumes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bundled import MODEL, TARGET
from paceline.cluster.gateway.text import Tokenizer

QUESTION = [{"role": "user", "content": "What is 12 + 30? Show the work."}]
CODE = 'def read_lines(path):\n    """Return the lines of a file.'
NODE_CLIENT = Path(__file__).with_name("client_node.mjs")
NODE_PACKAGE = "openai@^7"


def test_stop_strings_cut_alike_however_tokens_come(cluster: Any) -> None:
    """Streamed or whole, drafted or not, cut at every place where the text can be."""
    client = cluster.client()
    how = {"model": MODEL, "prompt": CODE, "max_tokens": 40, "temperature": 0.8, "seed": 3}
    text = client.completions.create(**how).choices[0].text
    for at in range(1, min(len(text), 40) - 3, 4):
        stop = text[at : at + 3]
        for keep in (False, True):
            expected = text[: text.find(stop) + len(stop) * keep]
            for speculation in (True, False):
                extra = {"speculation": speculation, "include_stop_str_in_output": keep}
                whole = client.completions.create(**how, stop=[stop, "\x00"], extra_body=extra)
                parts = client.completions.create(**how, stop=stop, extra_body=extra, stream=True)
                assert whole.choices[0].text == expected
                assert whole.choices[0].finish_reason == "stop"
                assert "".join(part.choices[0].text for part in parts) == expected


def test_a_broken_stream_goes_on_with_the_same_text(cluster: Any) -> None:
    """Cut behind every few events, with two choices, their log-probabilities and their usage."""
    body = {
        "model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0.9, "n": 2, "stream": True,
        "logprobs": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    whole, headers = _events(cluster.url, body, None)
    body["seed"] = int(headers["x-paceline-seed"])
    assert len(whole) > 10
    for cut in range(1, len(whole), 3):
        rest, again = _events(cluster.url, body, whole[cut - 1][0], headers["x-request-id"])

        assert again["x-request-id"] == headers["x-request-id"]
        assert _put_together([*whole[:cut], *rest]) == _put_together(whole)


def test_an_evaluation_suite_gets_the_scores_of_its_own_tokens(cluster: Any) -> None:
    """Lists of token ids, echo, one token to generate: what multiple-choice tasks send, many at once."""
    tokenizer = Tokenizer(TARGET)
    prompts = [tokenizer.encode(CODE + end) for end in ('"""', " Or not.", "")]
    answer = cluster.client().completions.create(
        model=MODEL, prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )

    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(prompt) + 1
        assert choice.logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
        assert choice.text.startswith(tokenizer.decode(prompt))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


def test_a_benchmark_client_gets_as_many_tokens_as_it_asked_for(cluster: Any) -> None:
    """ignore_eos, and usage in each chunk."""
    extra = {"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = list(
        cluster.client().chat.completions.create(
            model=MODEL, messages=QUESTION, max_completion_tokens=70, stream=True, extra_body=extra
        )
    )

    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 70
    assert chunks[-1].choices == []


def test_clients_see_what_is_not_served_yet(cluster: Any) -> None:
    """A 400 that names the field, as the client's own exception."""
    client = cluster.client()
    for field, value in (
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        ("prediction", {"type": "content", "content": "x"}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=QUESTION, **{field: value})
        assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")
    plain = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=2,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
    )
    assert plain.usage is not None and plain.usage.completion_tokens == 2


@pytest.mark.slow
def test_the_node_client_works(cluster: Any, tmp_path: Path) -> None:
    """Whole and streamed answers, errors, an aborted stream; its text equals the Python client's."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("THE NODE CLIENT IS NOT TESTED: there is no node or no npm here")
    shutil.copy(NODE_CLIENT, tmp_path)
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), NODE_PACKAGE]
    done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode != 0:
        pytest.skip(f"THE NODE CLIENT IS NOT TESTED: npm cannot install {NODE_PACKAGE}: {done.stderr[-300:]}")

    command = [node, NODE_CLIENT.name, f"{cluster.url}/v1", MODEL, "none"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    expected = cluster.client().chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=24, temperature=0.7, seed=11
    )
    text = expected.choices[0].message.content
    assert told["whole"] == told["text"] == told["final"] == told["again"][0] == text
    assert told["again"][1] != text
    assert expected.usage is not None
    assert told["usage"] == expected.usage.completion_tokens
    assert told["numScored"] > 0 and told["echoed"] >= 3
    assert (told["seed"], told["requestId"], told["models"]) == ("11", True, [MODEL])
    assert told["errors"] == [
        ["NotFoundError", 404, "model_not_found", "model"],
        ["BadRequestError", 400, "invalid_value", "temperature"],
        ["BadRequestError", 400, "unsupported_parameter", "tools"],
    ]


def _events(
    url: str, body: dict[str, Any], last: str | None, request_id: str = ""
) -> tuple[list[tuple[str, dict[str, Any]]], httpx.Headers]:
    """(id, data) of a stream's events, up to [DONE]."""
    headers = {"accept": "text/event-stream"}
    if last is not None:
        headers |= {"last-event-id": last, "x-request-id": request_id}
    events = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        text = "".join(answer.iter_text())
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        if "id" in fields:
            events.append((fields["id"], json.loads(fields["data"])))
    assert text.endswith("data: [DONE]\n\n")
    return events, answer.headers


def _put_together(events: list[tuple[str, dict[str, Any]]]) -> tuple[Any, ...]:
    """Texts, scored tokens, ends and usage, as a client that follows the stream has them."""
    texts, tokens, ends = ["", ""], [[], []], [[], []]
    usage = None
    for _, data in events:
        usage = data["usage"] and data["usage"]["completion_tokens"] or usage
        for choice in data["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            tokens[choice["index"]] += [
                item["token"] for item in (choice["logprobs"] or {}).get("content", [])
            ]
            ends[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return texts, tokens, ends, usage
