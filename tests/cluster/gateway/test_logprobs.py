"""Streams with log-probabilities -> what the openai client reads, whole and in chunks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.cluster.config import ClusterConfig
from paceline.cluster.gateway.fakes import Act, Script, ScriptedStreams
from paceline.cluster.gateway.ingress import build_app
from paceline.cluster.gateway.logprobs import Score, score_prompt, unpack
from paceline.cluster.gateway.streams import StreamEvent
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Logprobs, Request

SPECIALS = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
EOS = 1
TEMPLATE = "{% for m in messages %}{{ '<|user|>' + m.content }}{% endfor %}<|assistant|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, but for "he"."""
    folder: Path = tmp_path_factory.mktemp("bytes")
    texts = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    vocab = {text: id for id, text in enumerate(texts)}
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(SPECIALS)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|bos|>", "chat_template": TEMPLATE})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    return Tokenizer(folder)


def scores(ids: Sequence[int], num_top: int) -> Logprobs:
    """Token x has log-probability -x / 100; the most probable are the ids behind it, at -0.1, -0.2 and so on."""
    own = np.asarray(ids) / -100
    top_ids = np.asarray(ids)[:, None] + 1 + np.arange(num_top)
    top = np.broadcast_to(-0.1 * (1 + np.arange(num_top)), top_ids.shape)
    return Logprobs(
        num_top,
        own.astype("<f4").tobytes(),
        np.full(len(ids), 7, "<i4").tobytes(),
        top_ids.astype("<i4").tobytes(),
        top.astype("<f4").tobytes(),
    )


def script(text: str, tokenizer: Tokenizer, *, group: int = 2, finish: str = "stop") -> Any:
    """A stream that says a text and stops, with the log-probabilities it was asked for."""

    def play(request: Request) -> Script:
        ids = [*tokenizer.encode(text), *([EOS] if finish == "stop" else [])]
        events: list[Act] = []
        for start in range(0, len(ids), group):
            part = ids[start : start + group]
            found = None if request.logprobs is None else scores(part, request.logprobs)
            prompt = None
            if start == 0 and request.prompt_logprobs is not None:
                prompt = scores(request.prompt_ids[1:], request.prompt_logprobs)
            end: Any = finish if start + group >= len(ids) else None
            events.append(StreamEvent(tuple(part), bytes(len(part)), end, "", found, prompt))
        return events

    return play


@pytest.fixture
def ask(tokenizer: Tokenizer) -> Any:
    """Streams -> an openai client of a gateway over them, without a socket."""

    def ask(streams: ScriptedStreams) -> openai.AsyncOpenAI:
        app = build_app(ClusterConfig(), streams, tokenizer, Metrics(), max_context=60_000)
        transport = httpx.ASGITransport(app)
        return openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=transport),
        )

    return ask


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "", "messages": [{"role": "user", "content": "hi"}], **fields}


# --- chat -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 50])
async def test_a_chat_tells_of_each_token(ask: Any, tokenizer: Tokenizer, group: int) -> None:
    """Text, bytes and alternatives of every token shown; the token that ended the answer is not."""
    async with ask(ScriptedStreams(script("heé", tokenizer, group=group))) as client:
        answer = await client.chat.completions.create(**chat(logprobs=True, top_logprobs=2))
    he, first, second = tokenizer.encode("heé")
    content = answer.choices[0].logprobs.content

    assert answer.choices[0].message.content == "heé"
    assert [(t.token, t.bytes) for t in content] == [
        ("he", [104, 101]),
        ("bytes:\\xc3", [0xC3]),
        ("bytes:\\xa9", [0xA9]),
    ]
    assert [round(t.logprob, 5) for t in content] == [id / -100 for id in (he, first, second)]
    assert [round(t.logprob, 5) for t in content[0].top_logprobs] == [-0.1, -0.2]
    assert content[1].top_logprobs[0].bytes == [0xC4]


async def test_a_chat_without_alternatives_has_empty_lists(ask: Any, tokenizer: Tokenizer) -> None:
    """And one that did not ask has null."""
    streams = ScriptedStreams(script("ab", tokenizer))
    async with ask(streams) as client:
        bare = await client.chat.completions.create(**chat(logprobs=True))
        none = await client.chat.completions.create(**chat(logprobs=False))

    assert [t.top_logprobs for t in bare.choices[0].logprobs.content] == [[], []]
    assert none.choices[0].logprobs is None
    assert [(r.logprobs, r.prompt_logprobs) for r in streams.requests] == [(0, None), (None, None)]


@pytest.mark.parametrize("group", [1, 3, 50])
async def test_chunks_of_a_chat_tell_the_same_as_the_whole(
    ask: Any, tokenizer: Tokenizer, group: int
) -> None:
    """Half a character is a chunk with a token and no text."""
    async with ask(ScriptedStreams(script("né 😀", tokenizer, group=group))) as client:
        whole = await client.chat.completions.create(**chat(logprobs=True, top_logprobs=1))
        stream = await client.chat.completions.create(**chat(logprobs=True, top_logprobs=1, stream=True))
        choices = [chunk.choices[0] async for chunk in stream]
    told = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]

    assert told == whole.choices[0].logprobs.content and len(told) == 8
    assert "".join(choice.delta.content or "" for choice in choices) == "né 😀"
    assert bytes(byte for token in told for byte in token.bytes).decode() == "né 😀"
    assert choices[0].logprobs is None and choices[-1].logprobs is None


async def test_a_stop_string_ends_the_tokens_with_the_text(ask: Any, tokenizer: Tokenizer) -> None:
    """Tokens read up to the match are told, those behind it are not."""
    for group in (1, 4, 50):
        async with ask(ScriptedStreams(script("one END two", tokenizer, group=group))) as client:
            answer = await client.chat.completions.create(**chat(logprobs=True, stop="END"))

        assert answer.choices[0].message.content == "one "
        assert "".join(t.token for t in answer.choices[0].logprobs.content) == "one END"


async def test_a_stop_string_waits_for_the_minimum(ask: Any, tokenizer: Tokenizer) -> None:
    """As a stop token does."""
    streams = ScriptedStreams(script("END, END, END", tokenizer))
    async with ask(streams) as client:
        texts = [
            (await client.chat.completions.create(**chat(stop="END", extra_body={"min_tokens": num})))
            .choices[0]
            .message.content
            for num in (0, 3, 5, 8)
        ]

    assert texts == ["", "END, ", "END, ", "END, END, "]
    assert [request.sampling.min_tokens for request in streams.requests] == [0, 3, 5, 8]


async def test_prompt_log_probabilities_have_vllms_shape(ask: Any, tokenizer: Tokenizer) -> None:
    """By token id, the prompt's own first; none for the first position. A chat has them once."""
    async with ask(ScriptedStreams(script("a", tokenizer))) as client:
        answer = await client.chat.completions.create(**chat(extra_body={"prompt_logprobs": 1}))
        text = await client.completions.create(model="", prompt="ab", extra_body={"prompt_logprobs": 0})
    found = answer.model_extra["prompt_logprobs"]
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    a, b = tokenizer.encode("ab")

    assert found[0] is None and len(found) == len(ids)
    assert list(found[1]) == [str(ids[1]), str(ids[1] + 1)]
    assert found[1][str(ids[1])] == {
        "logprob": pytest.approx(ids[1] / -100),
        "rank": 7,
        "decoded_token": "h",
    }
    assert found[1][str(ids[1] + 1)]["rank"] == 1
    assert answer.choices[0].logprobs is None
    assert text.choices[0].model_extra["prompt_logprobs"] == [
        None,
        {str(b): {"logprob": pytest.approx(b / -100), "rank": 7, "decoded_token": "b"}},
    ]
    assert text.choices[0].text == "a" and a != b


# --- plain completions ----------------------------------------------------------------------------------


async def test_a_completion_has_four_aligned_lists(ask: Any, tokenizer: Tokenizer) -> None:
    """The token itself is always among its alternatives; offsets count characters of the text."""
    async with ask(ScriptedStreams(script("heé!", tokenizer))) as client:
        answer = await client.completions.create(model="", prompt="x", logprobs=1)
    he, first, second, mark = tokenizer.encode("heé!")
    found = answer.choices[0].logprobs

    assert found.tokens == ["he", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert found.text_offset == [0, 2, 2, 3]
    assert found.token_logprobs == [pytest.approx(id / -100) for id in (he, first, second, mark)]
    assert found.top_logprobs[3] == {'"': pytest.approx(-0.1), "!": pytest.approx(mark / -100)}


async def test_no_alternatives_leaves_the_token_itself(ask: Any, tokenizer: Tokenizer) -> None:
    """logprobs=0 is not the same as none."""
    async with ask(ScriptedStreams(script("a", tokenizer))) as client:
        answer = await client.completions.create(model="", prompt="x", logprobs=0)

    assert [list(top) for top in answer.choices[0].logprobs.top_logprobs] == [["a"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_puts_the_prompt_in_front(ask: Any, tokenizer: Tokenizer, stream: bool) -> None:
    """Text and tokens of the prompt, without a value for the very first, then the answer's; as lm_eval reads it."""
    streams = ScriptedStreams(script("he", tokenizer, finish="length"))
    ids = [0, *tokenizer.encode("né")]
    async with ask(streams) as client:
        call = client.completions.create(
            model="", prompt=[ids, tokenizer.encode("b")], echo=True, logprobs=1, max_tokens=1, stream=stream
        )
        if stream:
            choices = [chunk.choices[0] async for chunk in await call]
        else:
            choices = list((await call).choices)
    first = [choice for choice in choices if choice.index == 0]
    told = [choice.logprobs for choice in first if choice.logprobs is not None]

    def joined(name: str) -> list[Any]:
        return [value for part in told for value in getattr(part, name)]

    assert "".join(choice.text for choice in first) == "néhe"
    assert joined("tokens") == ["<|bos|>", "n", "bytes:\\xc3", "bytes:\\xa9", "he"]
    assert joined("text_offset") == [0, 0, 1, 1, 2]
    values = joined("token_logprobs")
    assert values[0] is None and values[1:] == [pytest.approx(i / -100) for i in (*ids[1:], 260)]
    assert joined("top_logprobs")[0] is None
    assert "".join(choice.text for choice in choices if choice.index == 1) == "bhe"
    assert [request.prompt_logprobs for request in streams.requests] == [1, 1]


async def test_an_echo_may_be_all(ask: Any, tokenizer: Tokenizer) -> None:
    """max_tokens=0: the prompt is scored, nothing is said, and only the prompt counts."""
    streams = ScriptedStreams(script("x", tokenizer, finish="length"))
    async with ask(streams) as client:
        answer = await client.completions.create(model="", prompt="abc", echo=True, logprobs=0, max_tokens=0)
        bare = await client.completions.create(model="", prompt="abc", echo=True, max_tokens=0)

    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.usage.completion_tokens == 0
    assert (bare.choices[0].text, bare.choices[0].logprobs) == ("abc", None)
    assert [(r.max_tokens, r.prompt_logprobs) for r in streams.requests] == [(1, 0), (1, None)]


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"logit_bias": {"9999": 1}}, "logit_bias", "logit_bias: token id 9999: expected 0..260"),
        (
            {"min_tokens": 6, "max_tokens": 5},
            "min_tokens",
            "min_tokens=6: expected a whole number from 0 to 5, the tokens to generate",
        ),
        (
            {"min_tokens": 17},
            "min_tokens",
            "min_tokens=17: expected a whole number from 0 to 16, the tokens to generate",
        ),
        (
            {"prompt_logprobs": 20, "prompt": [7] * 20_000},
            "prompt_logprobs",
            "prompt_logprobs=20: expected a whole number from 0 to 12 with a prompt of 20000 tokens",
        ),
        (
            {"logprobs": 5, "echo": True, "prompt": [7] * 50_000},
            "logprobs",
            "logprobs=5: expected a whole number from 0 to 4 with a prompt of 50000 tokens",
        ),
    ],
)
async def test_what_depends_on_the_prompt_is_refused_with_its_range(
    ask: Any, fields: dict[str, Any], param: str, message: str
) -> None:
    """Before a stream is started."""
    streams = ScriptedStreams([])
    async with ask(streams) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="", prompt="a", extra_body=fields)

    assert caught.value.body["param"] == param
    assert caught.value.body["message"] == message
    assert not streams.requests


async def test_tokens_without_their_log_probabilities_are_an_error(ask: Any) -> None:
    """Better than an answer with holes."""
    async with ask(ScriptedStreams([StreamEvent((9,), b"\0", "length")])) as client:
        with pytest.raises(openai.InternalServerError, match="without the log-probabilities"):
            await client.completions.create(model="", prompt="a", logprobs=1)


async def test_priority_and_salt_reach_the_stream(ask: Any, tokenizer: Tokenizer) -> None:
    """For the scheduler and the prefix cache."""
    streams = ScriptedStreams(script("a", tokenizer))
    async with ask(streams) as client:
        await client.completions.create(
            model="", prompt="a", extra_body={"priority": -3, "cache_salt": "tenant"}
        )

    assert (streams.requests[0].priority, streams.requests[0].cache_salt) == (-3, "tenant")


# --- parts ----------------------------------------------------------------------------------------------


def test_minus_infinity_becomes_a_number_json_has() -> None:
    """As with vLLM."""
    impossible = np.asarray([-math.inf], "<f4").tobytes()
    one = np.asarray([1], "<i4").tobytes()

    assert unpack(Logprobs(1, impossible, one, one, impossible)) == [Score(-9999.0, 1, ((1, -9999.0),))]


def test_tokens_of_a_model_that_spells_bytes_and_drops_a_space(tmp_path: Path) -> None:
    """SentencePiece style: `<0xE2>` is a byte, and a word's token begins with its space."""
    words = ["<s>", "▁", "▁hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {text: id for id, text in enumerate(words)}
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    bpe.add_special_tokens(["<s>"])
    bpe.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = [vocab[text] for text in ("<s>", "▁hello", "▁world", "<0xC3>", "<0xA9>", "!")]
    found = [tokenizer.token_bytes(id) for id in ids]

    assert found == [b"<s>", b" hello", b" world", b"\xc3", b"\xa9", b"!"]
    assert tokenizer.token_bytes(9999) == b""
    scored = score_prompt(ids, scores(ids[1:], 0), tokenizer, len(" hello worldé!"))
    assert [token.offset for token in scored] == [0, 0, 6, 12, 12, 13]
