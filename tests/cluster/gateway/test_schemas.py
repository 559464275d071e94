"""Request bodies: what is honoured, what is refused, and how the refusal reads."""

from typing import Any

import msgspec
import pytest

from paceline.cluster.errors import RequestError
from paceline.cluster.gateway.schemas import ChatRequest, CompletionRequest, parse

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, msgspec.json.encode({"messages": HI, **fields}))


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, msgspec.json.encode(fields))


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_openais() -> None:
    """One choice, temperature 1, everything kept, speculation on."""
    body = chat()

    assert (body.n, body.temperature, body.top_p, body.stop, body.stream) == (1, 1.0, 1.0, [], False)
    assert body.speculation
    assert body.token_limit is None


def test_null_means_not_given_and_unknown_fields_are_ignored() -> None:
    """Clients send both."""
    names = ["n", "seed", "stop", "max_tokens", "stream_options", "tools", "logprobs", "temperature", "user"]

    assert chat(**dict.fromkeys(names), not_invented_yet={"a": 1}) == chat()


def test_the_newer_name_of_the_token_limit_wins() -> None:
    """max_completion_tokens over max_tokens."""
    assert chat(max_tokens=5).token_limit == 5
    assert chat(max_tokens=5, max_completion_tokens=7).token_limit == 7


@pytest.mark.parametrize(
    ("seed", "bits"), [(0, 0), (7, 7), (-1, 2**64 - 1), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1)]
)
def test_a_seed_is_read_as_64_bits(seed: int, bits: int) -> None:
    """The noise is keyed by an unsigned number; clients may send any int64."""
    body = chat(seed=seed, temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1)
    sampling = body.sampling(body.chosen_seed(), 2, 3)

    assert (sampling.seed, sampling.prompt_index, sampling.choice) == (bits, 2, 3)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 0, 0.9, 0.1)


def test_a_seed_made_here_can_be_sent_back() -> None:
    """It fits the range that requests may use."""
    seed = chat().chosen_seed()

    assert chat(seed=seed).chosen_seed() == seed


def test_content_may_come_in_parts() -> None:
    """Text parts are joined."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert chat(messages=[{"role": "developer", "content": parts}]).messages[0].flat() == {
        "role": "developer",
        "content": "ab",
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
    ],
)
def test_a_prompt_has_four_shapes(prompt: Any, expected: Any) -> None:
    """All become a list of prompts."""
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "prompt", [3, [], [1, "a"], [True], [-1], [1.5], [2**31], ["a"] * 65, {"a": 1}, [[["a"]]]]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    """Before anything is made of them."""
    with pytest.raises(RequestError, match="prompt=.*: expected a string, a list of token ids") as caught:
        completion(prompt=prompt)

    assert caught.value.param == "prompt"


def test_prompts_times_choices_are_bounded() -> None:
    """Each is a stream of its own."""
    with pytest.raises(RequestError, match="at most 64"):
        completion(prompt=["a"] * 20, n=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature=3: expected a number from 0 to 2"),
        ({"temperature": "1"}, 'temperature="1": expected a number from 0 to 2'),
        ({"top_p": 0}, "top_p=0: expected a number above 0, up to 1"),
        ({"top_k": -2}, "top_k=-2: expected"),
        ({"min_p": 1.5}, "min_p=1.5: expected a number from 0 to 1"),
        ({"n": 9}, "n=9: expected a whole number from 1 to 8"),
        ({"n": True}, "n=true: expected a whole number from 1 to 8"),
        ({"n": 10**40}, "n=1000"),
        ({"seed": 2**63}, "seed=9223372036854775808: expected"),
        ({"max_tokens": 0}, "max_tokens=0: expected"),
        ({"stop": ["a"] * 17}, "stop=<17 items>: expected a string or up to 16"),
        ({"stop": ""}, 'stop[0]="": expected'),
        ({"stop": "x" * 300}, "stop[0]="),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]=-1: expected"),
        ({"stream": "yes"}, 'stream="yes": expected true or false'),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage=1: expected"),
        ({"metadata": 1}, "metadata=1: expected an object"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1: expected a number from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3: expected a number from -2 to 2"),
        ({"frequency_penalty": "x"}, 'frequency_penalty="x": expected a number from -2 to 2'),
        ({"repetition_penalty": 0}, "repetition_penalty=0: expected a number from 0.01 to 100"),
        ({"repetition_penalty": -1.5}, "repetition_penalty=-1.5: expected a number from 0.01 to 100"),
        ({"logit_bias": {"5": 101}}, 'logit_bias["5"]=101: expected an object with up to 1024 token ids'),
        ({"logit_bias": {"5": True}}, 'logit_bias["5"]=true: expected an object'),
        ({"logit_bias": {"-5": 1}}, 'logit_bias="-5": expected an object'),
        ({"logit_bias": {"05": 1}}, 'logit_bias["05"]="05": expected an object'),
        ({"logit_bias": {"five": 1}}, 'logit_bias.five="five": expected an object'),
        ({"logit_bias": [5]}, "logit_bias=[5]: expected an object"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias=<1025 items>: expected"),
        ({"min_tokens": -1}, "min_tokens=-1: expected a whole number from 0"),
        ({"logprobs": 1}, "logprobs=1: expected true or false"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs=21: expected a whole number from 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs=2: expected logprobs=true with it"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1: expected a whole number from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs=1: expected none with stream=true"),
        ({"priority": 1.5}, "priority=1.5: expected a whole number"),
        ({"priority": 1 << 31}, "priority=2147483648: expected a whole number"),
        ({"cache_salt": "x" * 257}, "cache_salt="),
        ({"messages": []}, "messages=[]: expected 1 to 1024 messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 'messages[0].role="tool": expected'),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content=1: expected"),
        ({"messages": HI * 1025}, "messages=<1025 items>: expected"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ],
)
def test_a_bad_value_is_named_with_its_legal_range(fields: dict[str, Any], message: str) -> None:
    """Field, value, range: enough to repair the request without the manual; and never longer than a line."""
    error = refusal(**fields)

    assert str(error).startswith(message)
    assert error.param == next(iter(fields))
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"echo": True},
        {"best_of": 2},
        {"prediction": {"type": "content", "content": "x"}},
        {"suffix": "x"},
    ],
)
def test_what_is_not_served_yet_is_refused_by_name(fields: dict[str, Any]) -> None:
    """Rather than answered as if it had not been asked."""
    error = refusal(**fields)

    assert error.param == next(iter(fields))
    assert error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": 6}, "logprobs=6: expected a whole number from 0 to 5"),
        ({"logprobs": True}, "logprobs=true: expected a whole number from 0 to 5"),
        ({"max_tokens": 0}, "max_tokens=0: expected a whole number from 1 to 1048576, or 0 with echo=true"),
        ({"echo": "yes"}, 'echo="yes": expected true or false'),
    ],
)
def test_plain_completions_have_ranges_of_their_own(fields: dict[str, Any], message: str) -> None:
    """Fewer alternatives than a chat, and a prompt may be all there is to say."""
    with pytest.raises(RequestError) as caught:
        completion(prompt="a", **fields)

    assert str(caught.value).startswith(message)
    assert caught.value.param == next(iter(fields)) and caught.value.status == 400


def test_sampling_parameters_reach_the_stream() -> None:
    """A bias comes sorted by id; one of 0 is none."""
    body = chat(
        repetition_penalty=1.2,
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"10": -100, "9": 1.5, "3": 0},
        min_tokens=4,
    )
    sampling = body.sampling(1, 0, 0)

    assert sampling.logit_bias == ((9, 1.5), (10, -100.0))
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.2, -2.0)
    assert (sampling.frequency_penalty, sampling.min_tokens) == (0.5, 4)
    assert sampling.is_adjusted and not chat().sampling(1, 0, 0).is_adjusted


def test_what_log_probabilities_are_needed() -> None:
    """An echo with logprobs needs the prompt's; the larger of two wishes is computed."""
    wishes = [
        chat(),
        chat(logprobs=True),
        chat(logprobs=True, top_logprobs=4, prompt_logprobs=0),
        completion(prompt="a", logprobs=0),
        completion(prompt="a", logprobs=3, echo=True),
        completion(prompt="a", logprobs=3, echo=True, prompt_logprobs=7, max_tokens=0),
        completion(prompt="a", echo=True, logprobs=False, prompt_logprobs=False),
    ]

    assert [body.num_logprobs for body in wishes] == [None, 0, 4, 0, 3, 3, None]
    assert [body.num_prompt_logprobs for body in wishes] == [None, None, 0, None, 3, 7, None]


def test_values_that_change_nothing_pass() -> None:
    """Clients spell out defaults."""
    chat(
        response_format={"type": "text"},
        tools=[],
        tool_choice="auto",
        logprobs=False,
        top_logprobs=0,
        logit_bias={},
        frequency_penalty=0.0,
        presence_penalty=0,
        repetition_penalty=1.0,
        min_tokens=0,
        echo=False,
        best_of=2,
        n=2,
        suffix="",
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"3",
        b"{",
        b'{"a": NaN}',
        b'{"prompt": "\\ud800xxxxxxx"}',
        b'{"prompt": "\xff"}',
        b"[" * 9999,
        b'{"a": 1e999}',
    ],
)
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    """Lone surrogates, infinities and bottomless nesting included."""
    with pytest.raises(RequestError) as caught:
        parse(CompletionRequest, body)

    assert caught.value.code == "invalid_json"


def test_a_missing_field_is_named() -> None:
    """With what it should hold."""
    with pytest.raises(RequestError, match="prompt: missing; expected a string") as caught:
        completion()

    assert caught.value.code == "missing_required_parameter"


def test_store_tells_false_from_nothing() -> None:
    """A tenant's default may be yes: then only a client that says no means no."""
    assert chat().store is None
    assert chat(store=None).store is None
    assert chat(store=True).store is True
    assert chat(store=False).store is False
    assert refusal(store="true").param == "store"


def test_metadata_is_a_small_map_of_strings() -> None:
    """As with OpenAI: 16 pairs, keys up to 64 characters, values up to 512."""
    most = {f"{number:064}": "v" * 512 for number in range(16)}
    assert chat(metadata=most).metadata == most
    assert chat(metadata={"domain": "code"}).domain == "code"
    assert chat().domain == chat(metadata={"kind": "x"}).domain == ""

    for wrong in (
        {**most, "one more": ""},
        {"k" * 65: "v"},
        {"": "v"},
        {"k": "v" * 513},
        {"k": 1},
        {"k": None},
        ["k"],
        "k",
        {"domain": "d" * 65},
        {"domain": "a\tb"},
        {"domain": "caf\u00e9"},
    ):
        error = refusal(metadata=wrong)
        assert error.param == "metadata"
        assert "expected an object with up to 16 pairs of strings" in str(error)
