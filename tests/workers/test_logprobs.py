"""Streams that ask for log-probabilities -> those of transformers, the same with drafts, chunks and preemption."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_DRAFT, Logprobs, Request, Sampling
from paceline.workers.drafters.base import Drafter
from paceline.workers.engine import Engine
from paceline.workers.logprobs import LogprobBook, measure
from paceline.workers.model_runner import ModelRunner

VOCAB = 211
LENGTH = 20
TOLERANCE = 1e-4
RunnerFactory = Callable[..., ModelRunner]


def ask(name: str, num_prompt: int, sampling: Sampling, **how: int | None) -> Request:
    ids = np.random.default_rng(num_prompt).integers(3, VOCAB, num_prompt)
    return Request(name, tuple(ids.tolist()), sampling, LENGTH, **how)  # type: ignore[arg-type]


PENALISED = Sampling(4, 0.0, repetition_penalty=1.5, logit_bias=((9, 3.0),), frequency_penalty=0.8)
REQUESTS = [
    ask("greedy", 5, Sampling(1, 0.0), logprobs=3),
    ask("drawn", 17, Sampling(2, 0.7, 20, 0.9), logprobs=0),
    ask("penalised", 9, PENALISED, logprobs=20, prompt_logprobs=0),
    ask("prompt", 33, Sampling(5), prompt_logprobs=4),
    ask("both", 40, Sampling(6), logprobs=1, prompt_logprobs=2),
    ask("one token", 1, Sampling(7), logprobs=2, prompt_logprobs=2),
    ask("neither", 12, Sampling(8)),
    ask("all", 3, Sampling(9), logprobs=500),
]

Table = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""own [n], ranks [n], top_ids [n, k], top [n, k]."""


def read(found: Logprobs) -> Table:
    """The arrays of a message."""
    own, ranks = np.frombuffer(found.own, "<f4"), np.frombuffer(found.ranks, "<i4")
    shape = (len(own), found.num_top)
    top_ids, top = np.frombuffer(found.top_ids, "<i4"), np.frombuffer(found.top, "<f4")
    return own, ranks, top_ids.reshape(shape), top.reshape(shape)


class Guesses(Drafter):
    """The text, with wrong siblings in front, and an error now and then."""

    name = "guesses"

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self._texts = texts
        self._random = np.random.default_rng(1)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        return [self._tree(stream) for stream in streams]

    def _tree(self, stream: Stream) -> Tree | None:
        future = self._texts[stream.request.id][stream.num_output : stream.num_output + 4]
        tokens: list[int] = []
        parents: list[int] = []
        spine = -1
        for token in future:
            right = token if self._random.random() > 0.2 else (token + 1) % VOCAB
            tokens += [(token + 7) % VOCAB, right]
            parents += [spine, spine]
            spine = len(tokens) - 1
        return Tree.build(int(stream.token_ids[-1]), tokens, parents) if tokens else None


class Told:
    """What an engine said of each stream."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.texts: dict[str, list[int]] = {one.id: [] for one in requests}
        self.prompts: dict[str, Table] = {}
        self.num_accepted = self.num_preempted = 0
        pieces: dict[str, list[Table]] = {}
        for one in requests:
            engine.add(one)
        while len(engine.scheduler):
            for emission in engine.step().emissions:
                name = emission.stream.request.id
                is_first = not self.texts[name]
                self.texts[name].extend(emission.tokens)
                self.num_accepted += emission.sources.count(SOURCE_DRAFT)
                self.num_preempted += emission.stream.num_preempted if emission.finish else 0
                if emission.logprobs is not None:
                    table = read(emission.logprobs)
                    assert len(table[0]) == len(emission.tokens)
                    pieces.setdefault(name, []).append(table)
                if emission.prompt_logprobs is not None:
                    assert is_first
                    self.prompts[name] = read(emission.prompt_logprobs)
        assert not engine._logprobs and not engine._logprobs._held
        self.outputs: dict[str, Table] = {
            name: tuple(np.concatenate(column) for column in zip(*tables, strict=True))  # type: ignore[misc]
            for name, tables in pieces.items()
        }


@pytest.fixture(scope="module")
def plain(make_runner: RunnerFactory) -> Told:
    """Without speculation."""
    return Told(Engine(make_runner("llama", num_blocks=500), token_budget=512, max_streams=8), REQUESTS)


def expect(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids) - 1, V]: log-probabilities of each token behind the first, by transformers."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0, :-1].double().log_softmax(-1)


def compare(table: Table, expected_NV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> None:
    """Values within rounding; ids where their neighbours are not equal within rounding."""
    own, ranks, top_ids, top = table
    wanted = expected_NV[torch.arange(len(token_ids)), torch.tensor(token_ids, dtype=torch.int64)]
    sorted_NV = expected_NV.sort(descending=True).values.numpy()

    assert np.abs(own - wanted.numpy()).max(initial=0) < TOLERANCE
    assert top_ids.shape == top.shape == (len(token_ids), min(num_top, VOCAB))
    assert np.abs(top - sorted_NV[:, : top.shape[1]]).max(initial=0) < TOLERANCE
    assert (np.abs(top - np.take_along_axis(expected_NV.numpy(), top_ids.astype(int), 1)) < TOLERANCE).all()
    low = (expected_NV > wanted[:, None] + TOLERANCE).sum(-1).numpy()
    high = (expected_NV >= wanted[:, None] - TOLERANCE).sum(-1).numpy()
    assert ((low < ranks) & (ranks <= high)).all()


def test_log_probabilities_are_those_of_transformers(
    plain: Told, oracle_model: Callable[[str], PreTrainedModel]
) -> None:
    """Of the raw logits: temperature, filters, bias and penalties leave no trace in them."""
    asked = {one.id for one in REQUESTS if one.logprobs is not None}
    for one in REQUESTS:
        ids = [*one.prompt_ids, *plain.texts[one.id]]
        expected = expect(oracle_model("llama"), ids)
        split = len(one.prompt_ids) - 1
        if one.logprobs is not None:
            compare(plain.outputs[one.id], expected[split:], ids[split + 1 :], one.logprobs)
        if one.prompt_logprobs is not None:
            compare(plain.prompts[one.id], expected[:split], ids[1 : split + 1], one.prompt_logprobs)

    assert set(plain.outputs) == asked
    assert set(plain.prompts) == {"penalised", "prompt", "both", "one token"}
    assert (plain.outputs["greedy"][1] == 1).all() and (plain.outputs["penalised"][1] > 1).any()


@pytest.mark.parametrize(("num_blocks", "budget"), [(500, 512), (500, 13), (30, 64)])
@pytest.mark.parametrize("draft", [False, True])
def test_they_do_not_depend_on_how_the_tokens_came(
    num_blocks: int, budget: int, draft: bool, make_runner: RunnerFactory, plain: Told
) -> None:
    """Drafted or not, in one chunk or many, preempted or not: the same ids, and numbers within rounding."""
    drafter = Guesses(plain.texts) if draft else None
    runner = make_runner("llama", num_blocks=num_blocks)
    told = Told(Engine(runner, token_budget=budget, max_streams=8, drafter=drafter), REQUESTS)

    assert told.texts == plain.texts
    assert (told.num_accepted > 20) == draft
    assert (told.num_preempted > 0) == (num_blocks < 500)
    for ours, theirs in ((told.outputs, plain.outputs), (told.prompts, plain.prompts)):
        assert set(ours) == set(theirs)
        for name, (own, ranks, top_ids, top) in ours.items():
            assert np.array_equal(top_ids, theirs[name][2]) and np.array_equal(ranks, theirs[name][1])
            assert np.abs(own - theirs[name][0]).max(initial=0) < 1e-5
            assert np.abs(top - theirs[name][3]).max(initial=0) < 1e-5


def test_a_prefix_known_already_is_computed_again_for_its_logits(make_runner: RunnerFactory) -> None:
    """KV found in the cache brings no logits, so such a request does not use it."""
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=2)
    one = REQUESTS[4]
    first, second = Told(engine, [one]), Told(engine, [one])

    assert np.array_equal(first.prompts["both"][0], second.prompts["both"][0])
    assert len(second.prompts["both"][0]) == len(one.prompt_ids) - 1


def test_a_resumed_stream_tells_of_its_own_tokens_and_the_whole_prompt(
    make_runner: RunnerFactory, plain: Told
) -> None:
    """What an earlier attempt emitted is not told again."""
    engine = Engine(make_runner("llama"), token_budget=16, max_streams=2)
    stream = engine.add(REQUESTS[4], epoch=1, resumed=plain.texts["both"][:7])
    emissions = []
    while len(engine.scheduler):
        emissions += engine.step().emissions
    tables = [read(e.logprobs) for e in emissions if e.logprobs is not None]
    own = np.concatenate([table[0] for table in tables])
    prompts = [read(e.prompt_logprobs) for e in emissions if e.prompt_logprobs is not None]

    assert stream.num_output == LENGTH
    assert np.abs(own - plain.outputs["both"][0][7:]).max() < 1e-5
    assert len(prompts) == 1 and np.abs(prompts[0][0] - plain.prompts["both"][0]).max() < 1e-5


def test_a_stop_inside_a_path_cuts_the_log_probabilities_too(make_runner: RunnerFactory, plain: Told) -> None:
    """As many as tokens, wherever the end fell."""
    text = plain.texts["greedy"]
    for at in range(4, 9):
        stop = next(i for i in range(at, LENGTH) if text[i] not in text[:i])
        one = Request(
            "greedy", REQUESTS[0].prompt_ids, REQUESTS[0].sampling, LENGTH, (text[stop],), logprobs=1
        )
        drafter = Guesses(plain.texts)
        told = Told(Engine(make_runner("llama"), token_budget=64, max_streams=1, drafter=drafter), [one])

        assert told.texts["greedy"] == text[: stop + 1]
        assert np.abs(told.outputs["greedy"][0] - plain.outputs["greedy"][0][: stop + 1]).max() < 1e-5


def test_nobody_asking_costs_nothing(make_runner: RunnerFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is kept, and nothing of the book is called."""

    def called(*_: object) -> None:
        raise AssertionError("called though nobody asked")

    for name in ("prompt_rows", "take_prompts", "prompt", "hold", "output"):
        monkeypatch.setattr(LogprobBook, name, called)
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=2)

    assert len(engine.run([REQUESTS[6]])["neither"]) == LENGTH


def test_measure_counts_ties_and_copes_with_minus_infinity() -> None:
    """A rank is the number of tokens at least as probable."""
    logits = torch.tensor([[1.0, 1.0, -torch.inf, 0.0], [0.0, 0.0, 0.0, 0.0]])
    own, ranks, top_ids, top = read(measure(logits, [1, 3], 2))
    half = -np.log(2 + np.exp(-1))

    assert np.allclose(own, [half, -np.log(4)])
    assert ranks.tolist() == [2, 4]
    assert set(top_ids[0]) == {0, 1} and np.allclose(top[0], half)
    assert read(measure(logits[:1], [2], 4))[0].tolist() == [-np.inf]
