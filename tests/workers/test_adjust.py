"""Bias, penalties and minimum length -> the oracle's text, whatever is drafted, preempted or taken over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import oracle
from paceline.cluster.errors import RequestError
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_DRAFT, DraftOpen, Request, Sampling
from paceline.workers import adjust
from paceline.workers.adjust import TokenCounts, apply_changes, paths_of
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters.base import Drafter
from paceline.workers.drafters.colocated import ColocatedDrafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner

VOCAB = 211
LENGTH = 32
RunnerFactory = Callable[..., ModelRunner]
OracleFactory = Callable[[str], PreTrainedModel]

FAVOURED = tuple((token, 9.0) for token in (20, 33, 47, 90, 151))
"""A bias that leaves five tokens to choose from: they come again and again, so counts decide."""
CASES = {
    "repetition": {"repetition_penalty": 1.4},
    "rewarded repetition": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.7},
    "frequency": {"frequency_penalty": 1.1},
    "negative": {"frequency_penalty": -0.4, "presence_penalty": -1.0},
    "bias": {"logit_bias": ((7, 4.0), (8, -100.0), (100, 2.5))},
    "favoured and penalised": {"logit_bias": FAVOURED, "frequency_penalty": 1.3},
    "favoured and repeated": {"logit_bias": FAVOURED, "repetition_penalty": 1.5, "presence_penalty": 0.6},
    "minimum": {"min_tokens": 12},
    "everything": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": FAVOURED,
        "min_tokens": 9,
    },
}


def requests() -> list[Request]:
    """Each case greedy and sampled; where a minimum holds, every fourth token would be a stop token."""
    found = []
    for index, (name, how) in enumerate(CASES.items()):
        ids = np.random.default_rng(index).integers(3, VOCAB, 3 + 5 * index)
        stops = tuple(range(60, 120)) if "min_tokens" in how else ()
        for suffix, basis in (
            ("greedy", Sampling(index, 0.0)),
            ("drawn", Sampling(index, 0.9, choice=1)),
            ("filtered", Sampling(index, 0.8, 40, 0.95, 0.02)),
        ):
            sampling = msgspec.structs.replace(basis, **how)  # type: ignore[arg-type]
            found.append(Request(f"{name}, {suffix}", tuple(ids.tolist()), sampling, LENGTH, stops))
    return found


REQUESTS = requests()


def as_params(sampling: Sampling) -> oracle.Params:
    """The oracle's own record of the same parameters."""
    return oracle.Params(**msgspec.structs.asdict(sampling))


def near_ties(text: list[int], one: Request, model: PreTrainedModel) -> int:
    """Compare with the oracle; a text may have been ended by a stop token only."""
    if len(text) < one.max_tokens:
        assert text[-1] in one.stop_ids
    assert not set(text[:-1]) & set(one.stop_ids)
    prompt = list(one.prompt_ids)
    return oracle.assert_same_text(text, model, prompt, as_params(one.sampling), len(text), one.stop_ids)


class Branches(Drafter):
    """Knows the text; each node of it has wrong siblings with children, among them tokens that were said before."""

    name = "branches"

    def __init__(self, texts: dict[str, list[int]], *, depth: int = 5) -> None:
        self._texts, self._depth = texts, depth
        self._random = np.random.default_rng(5)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        return [self._tree(stream) for stream in streams]

    def _tree(self, stream: Stream) -> Tree | None:
        future = self._texts[stream.request.id][stream.num_output : stream.num_output + self._depth]
        tokens: list[int] = []
        parents: list[int] = []
        spine = -1
        for token in future:
            above = spine
            said = [int(t) for t in self._random.choice(stream.token_ids, 2)]
            for wrong in {*said, 20, 33} - {token}:
                tokens += [wrong, token]
                parents += [above, len(tokens) - 2]
            tokens.append(token)
            parents.append(above)
            spine = len(tokens) - 1
        return Tree.build(int(stream.token_ids[-1]), tokens, parents) if tokens else None


def drive(engine: Engine, wanted: Sequence[Request]) -> tuple[dict[str, list[int]], int, int]:
    """Texts, accepted draft tokens, preemptions."""
    texts: dict[str, list[int]] = {one.id: [] for one in wanted}
    accepted = preempted = 0
    for one in wanted:
        engine.add(one)
    while len(engine.scheduler):
        for emission in engine.step().emissions:
            assert emission.finish != "error", emission.error
            texts[emission.stream.request.id].extend(emission.tokens)
            accepted += emission.sources.count(SOURCE_DRAFT)
            preempted += emission.stream.num_preempted if emission.finish else 0
        engine.scheduler.check_integrity()
    assert not engine._adjuster
    return texts, accepted, preempted


@pytest.fixture(scope="module")
def plain(make_runner: RunnerFactory) -> dict[str, list[int]]:
    """Texts without speculation."""
    return drive(Engine(make_runner("llama", num_blocks=1000), token_budget=512, max_streams=40), REQUESTS)[0]


def test_plain_decoding_says_what_the_oracle_says(
    plain: dict[str, list[int]], oracle_model: OracleFactory
) -> None:
    """Each parameter alone and together, greedy, drawn and filtered."""
    model = oracle_model("llama")

    assert sum(near_ties(plain[one.id], one, model) for one in REQUESTS) == 0


def test_each_parameter_matters(make_runner: RunnerFactory, plain: dict[str, list[int]]) -> None:
    """Negative control: without it the text is another one."""
    bare = [
        msgspec.structs.replace(
            one, sampling=Sampling(**{f: getattr(one.sampling, f) for f in Sampling.__struct_fields__[:7]})
        )
        for one in REQUESTS
    ]
    engine = Engine(make_runner("llama", num_blocks=1000), token_budget=512, max_streams=40)
    texts = drive(engine, bare)[0]
    same = [name for name, text in texts.items() if text == plain[name]]

    assert same == []


@pytest.mark.parametrize(
    ("family", "num_blocks"),
    [
        ("llama", 60),
        pytest.param("llama", 1000, marks=pytest.mark.slow),
        pytest.param("gemma3", 60, marks=pytest.mark.slow),
        pytest.param("gemma3", 1000, marks=pytest.mark.slow),
    ],
)
def test_trees_and_preemption_leave_the_text_alone(
    family: str, num_blocks: int, make_runner: RunnerFactory, oracle_model: OracleFactory
) -> None:
    """Branches with repeated tokens are verified along their own paths; blocks taken away cost no count."""
    roomy = Engine(make_runner(family, num_blocks=1000), token_budget=512, max_streams=40)
    texts = drive(roomy, REQUESTS)[0]
    engine = Engine(
        make_runner(family, num_blocks=num_blocks),
        token_budget=400,
        max_streams=40,
        drafter=Branches(texts),
    )
    drafted, accepted, preempted = drive(engine, REQUESTS)

    assert drafted == texts
    assert accepted > 150
    assert (preempted > 0) == (num_blocks < 1000)
    assert sum(near_ties(texts[one.id], one, oracle_model(family)) for one in REQUESTS) == 0


def test_counts_of_the_root_alone_are_found_out(
    make_runner: RunnerFactory,
    oracle_model: OracleFactory,
    plain: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: penalties from the committed text, not along the path, fail against the oracle."""

    def of_the_root(tree: Tree | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        num = 1 if tree is None else len(tree)
        return np.empty(0, np.int64), np.empty(0, np.int64), np.zeros(num, np.int64)

    monkeypatch.setattr(adjust, "paths_of", of_the_root)
    runner = make_runner("llama", num_blocks=1000)
    engine = Engine(runner, token_budget=512, max_streams=40, drafter=Branches(plain))
    texts = drive(engine, REQUESTS)[0]
    wrong = 0
    for one in REQUESTS:
        try:
            near_ties(texts[one.id], one, oracle_model("llama"))
        except AssertionError:
            wrong += 1

    assert wrong > 10


def test_random_combinations_say_what_the_oracle_says(
    make_runner: RunnerFactory, oracle_model: OracleFactory
) -> None:
    """Any mixture of all parameters, drafted in a small pool."""
    draw = np.random.default_rng(31)

    def sampling(seed: int) -> Sampling:
        ids = draw.choice(VOCAB, int(draw.integers(0, 12)), replace=False)
        return Sampling(
            seed,
            float(draw.choice([0.0, 0.6, 1.0, 1.4])),
            int(draw.choice([0, 3, 30])),
            float(draw.choice([1.0, 0.9])),
            float(draw.choice([0.0, 0.05])),
            repetition_penalty=float(draw.choice([1.0, 0.9, 1.1, 1.8])),
            presence_penalty=float(draw.choice([0.0, -2.0, 0.3, 2.0])),
            frequency_penalty=float(draw.choice([0.0, -0.3, 0.2, 2.0])),
            logit_bias=tuple((int(i), float(draw.choice([-100, -3, 2, 6, 12]))) for i in ids),
            min_tokens=int(draw.choice([0, 1, 5, LENGTH])),
        )

    wanted = [
        Request(
            f"r{i}",
            tuple(draw.integers(3, VOCAB, int(draw.integers(1, 30))).tolist()),
            sampling(i),
            LENGTH,
            tuple(draw.choice(VOCAB, 12, replace=False).tolist()),
        )
        for i in range(50)
    ]
    roomy = Engine(make_runner("qwen3", num_blocks=1500), token_budget=512, max_streams=50)
    texts = drive(roomy, wanted)[0]
    engine = Engine(
        make_runner("qwen3", num_blocks=70), token_budget=200, max_streams=50, drafter=Branches(texts)
    )
    drafted, accepted, preempted = drive(engine, wanted)

    assert drafted == texts and accepted > 100 and preempted > 0
    assert sum(near_ties(texts[one.id], one, oracle_model("qwen3")) for one in wanted) <= 1


@pytest.mark.parametrize("known", [1, 8, 20])
def test_another_worker_goes_on_with_the_same_counts(
    known: int, make_runner: RunnerFactory, plain: dict[str, list[int]]
) -> None:
    """Output tokens of an earlier attempt are output tokens, not prompt."""
    engine = Engine(
        make_runner("llama", num_blocks=1000), token_budget=512, max_streams=40, drafter=Branches(plain)
    )
    wanted = [one for one in REQUESTS if len(plain[one.id]) > known]
    texts: dict[str, list[int]] = {one.id: plain[one.id][:known] for one in wanted}
    for one in wanted:
        engine.add(one, epoch=1, resumed=texts[one.id][:])
    while len(engine.scheduler):
        for emission in engine.step().emissions:
            texts[emission.stream.request.id].extend(emission.tokens)

    assert len(wanted) > 20
    assert texts == {one.id: plain[one.id] for one in wanted}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("minimum", [0, 1, 2, 7, LENGTH])
def test_a_stop_token_waits_for_the_minimum(
    temperature: float, minimum: int, make_runner: RunnerFactory
) -> None:
    """With a bias of 100 it is the argmax at every position, and comes at the first where it may."""
    stop = 42
    sampling = Sampling(3, temperature, logit_bias=((stop, 100.0),), min_tokens=minimum)
    one = Request("r", (5, 6, 7), sampling, LENGTH, (stop,))
    plain = drive(Engine(make_runner("llama"), token_budget=64, max_streams=1), [one])[0]["r"]
    drafter = Branches({"r": [stop if i % 3 == 2 else t for i, t in enumerate(plain)]}, depth=9)
    drafted = drive(Engine(make_runner("llama"), token_budget=256, max_streams=1, drafter=drafter), [one])[0]

    assert len(plain) == min(minimum + 1, LENGTH)
    assert plain.index(stop) == minimum if minimum < LENGTH else stop not in plain
    assert drafted["r"] == plain


def test_a_minimum_that_is_reached_costs_nothing_more(make_runner: RunnerFactory) -> None:
    """Its stream is like any other from there on."""
    one = Request("r", (5, 6, 7), Sampling(3, min_tokens=4), LENGTH, (42,))
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=1)
    engine.add(one)
    busy = []
    for _ in range(7):
        engine.step()
        busy.append(bool(engine._adjuster))

    assert busy == [True] * 4 + [False] * 3


def test_bias_of_a_hundred_bans_and_forces(make_runner: RunnerFactory, plain: dict[str, list[int]]) -> None:
    """-100 on all a text said so far, +100 on one token."""
    for one in REQUESTS[:3]:
        bare = Sampling(one.sampling.seed, one.sampling.temperature)
        banned = msgspec.structs.replace(bare, logit_bias=tuple((t, -100.0) for t in set(plain[one.id])))
        forced = msgspec.structs.replace(bare, logit_bias=((77, 100.0),))
        wanted = [
            Request("banned", one.prompt_ids, banned, LENGTH),
            Request("forced", one.prompt_ids, forced, LENGTH),
        ]
        texts = drive(Engine(make_runner("llama"), token_budget=64, max_streams=2), wanted)[0]

        assert not set(texts["banned"]) & set(plain[one.id])
        assert texts["forced"] == [77] * LENGTH


def test_a_row_with_nothing_left_is_an_error_of_its_stream(make_runner: RunnerFactory) -> None:
    """Every token a stop token, and none may come: unusable, and the stream beside it goes on."""
    one = Request("none", (5, 6), Sampling(1, min_tokens=3), LENGTH, tuple(range(VOCAB)))
    other = Request("other", (5, 6), Sampling(1, 0.0, min_tokens=3), LENGTH, tuple(range(VOCAB - 1)))
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=2)
    engine.add(one)
    engine.add(other)
    emissions = [e for _ in range(3) for e in engine.step().emissions]
    ends = {e.stream.request.id: (e.finish, e.error) for e in emissions if e.finish}

    assert ends == {"none": ("error", "the model gave no usable logits at position 2")}
    assert [e.tokens for e in emissions if e.stream.request.id == "other"] == [(VOCAB - 1,)] * 3


def test_a_bias_for_a_token_that_does_not_exist_is_refused(make_runner: RunnerFactory) -> None:
    """Before anything is admitted, with the range."""
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=2)
    for wrong in (VOCAB, -1):
        with pytest.raises(RequestError, match=rf"logit_bias: token id {wrong}: expected 0\.\.210"):
            engine.add(Request("r", (5,), Sampling(1, logit_bias=((wrong, 1.0),)), 4))
    assert len(engine.scheduler) == 0 and not engine._adjuster


# --- the draft side -------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [0, 1, 6])
def test_a_draft_equal_to_the_target_proposes_what_the_target_decides(
    known: int, make_runner: RunnerFactory, plain: dict[str, list[int]]
) -> None:
    """The same processors along its own spine: otherwise the coupling would be lost at the first penalty."""
    engine = DraftEngine(make_runner("llama", num_blocks=1000), token_budget=512)
    wanted = [one for one in REQUESTS if len(plain[one.id]) >= known + 5]
    for one in wanted:
        tokens = (*one.prompt_ids, *plain[one.id][:known])
        engine.open(one.id, DraftOpen(one.id, tokens, one.sampling, len(one.prompt_ids), one.stop_ids))
    trees, _ = engine.propose([one.id for one in wanted], depth=5, width=3)

    assert len(trees) == len(wanted) > 20
    for tree in trees:
        assert list(tree.tokens[:5]) == plain[tree.request_id][known : known + 5]


def test_a_drafter_of_the_same_model_is_always_right(
    make_runner: RunnerFactory, plain: dict[str, list[int]]
) -> None:
    """Over whole texts, kept in step by advances: every drafted spine is accepted."""
    drafts = DraftEngine(make_runner("llama", num_blocks=1000), token_budget=512)
    drafter = ColocatedDrafter(drafts, vocab_size=VOCAB, depth=4, width=1)
    engine = Engine(make_runner("llama", num_blocks=1000), token_budget=512, max_streams=40, drafter=drafter)
    texts, accepted, _ = drive(engine, REQUESTS)
    # The first token of a text and one of every five come from the target's own row.
    possible = sum(4 * (len(text) - 1) // 5 for text in texts.values())

    assert texts == plain
    assert accepted > 0.93 * possible


def test_a_draft_with_fewer_tokens_than_its_target_passes_over_the_rest() -> None:
    """Bias and stop tokens it lacks are none of its business."""
    sampling = Sampling(1, logit_bias=((3, 1.0), (900, 5.0)), min_tokens=4, repetition_penalty=2.0)
    counts = TokenCounts(sampling, (3, 900), (2, 901), 10)
    counts.extend([5, 900])
    behind_two = counts.changes(np.zeros(2, np.int64), np.array([6, 900]), np.array([2]))
    out = apply_changes(torch.ones(1, 10), [behind_two], [0])
    blocked = apply_changes(torch.ones(2, 10), [counts.changes(*paths_of(None))], [1])

    assert out.tolist() == [[1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0]]
    assert blocked[1, 2] == -torch.inf and bool((blocked[0] == 1).all())


def test_columns_do_not_pile_up() -> None:
    """Paths that were not taken leave nothing behind, and many tokens are counted rightly."""
    counts = TokenCounts(Sampling(1, frequency_penalty=1.0), (), (), 1000)
    text = np.random.default_rng(1).integers(0, 1000, 500)
    for token in text.tolist():
        path = np.array([999 - token, token, token])
        changes = counts.changes(np.zeros(3, np.int64), path, np.array([3]))
        out = apply_changes(torch.zeros(1, 1000), [changes], [0])
        expected = np.bincount([*text[: counts.num_output], *path], minlength=1000)
        assert torch.equal(out[0], -torch.from_numpy(expected).float())
        counts.extend([token])

    assert len(counts._column) == len(set(text.tolist()))
