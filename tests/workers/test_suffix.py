"""Texts that repeat themselves -> drafts of what followed before: found exactly, remembered briefly, never shared."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import harness
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree, is_tree
from paceline.cluster.types import SOURCE_SUFFIX, SOURCE_TARGET, Request, Sampling
from paceline.workers.drafters import suffix
from paceline.workers.drafters.suffix import FinishedOutputs, History, SuffixDrafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner, load_model, load_model_config

ROOM = 4096


def repeating(seed: int) -> list[int]:
    """A text over two to four letters that copies itself here and there."""
    choose = random.Random(seed)
    tokens = [0]
    num_letters = choose.randrange(2, 5)
    for _ in range(choose.randrange(40)):
        start = choose.randrange(len(tokens))
        tokens += tokens[start : start + choose.randrange(12)]
        tokens += [choose.randrange(num_letters) for _ in range(choose.randrange(4))]
    return tokens[:90]


TEXTS = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=90),
    st.integers(0, 2**32).map(repeating),
)


def stream(name: str, tokens: Sequence[int], num_prompt: int | None = None) -> Stream:
    """A stream whose tokens so far are these."""
    buffer = np.zeros(len(tokens) + ROOM, np.int32)
    buffer[: len(tokens)] = tokens
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    asked = Request(name, tuple(tokens[:num_prompt]), Sampling(1), ROOM)
    return Stream(asked, 0, buffer, len(tokens), num_prompt, 0)


def draft(tokens: Sequence[int], **how: int) -> Tree | None:
    """What a fresh drafter proposes behind these tokens."""
    drafter = SuffixDrafter(**how)
    one = stream("one", tokens)
    drafter.open(one)
    return drafter.propose([one])[0]


def finish(drafter: SuffixDrafter, name: str, output: Sequence[int]) -> None:
    """Run a stream with a prompt of nothing in particular and this output, to its end."""
    one = stream(name, [900], num_prompt=1)
    drafter.open(one)
    drafter.propose([one])
    one.append(list(output))
    drafter.observe([one])
    drafter.close(one)


def indexed(tokens: Sequence[int], *, max_match: int = 64, pieces: int = 1000) -> History:
    """A history of one text, indexed a few tokens at a time."""
    history = History(max_match=max_match)
    history.begin(-1)
    for start in range(0, len(tokens), pieces):
        history.extend(np.array(tokens[start : start + pieces], np.int32))
        while not history.is_indexed:
            history.index(3)
    return history


def common_suffixes(tokens: Sequence[int], limit: int) -> dict[int, int]:
    """By comparing everything: index -> how many tokens up to it equal the last ones, where two or more do."""
    found = {}
    for end in range(len(tokens) - 1):
        length = 0
        while length < min(limit, end + 1) and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= suffix.MIN_MATCH:
            found[end] = length
    return found


def path_to(tree: Tree, node: int) -> list[int]:
    """Tokens from below the root to a node."""
    tokens: list[int] = []
    while node > 0:
        tokens.insert(0, int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tokens


# -- matches ---------------------------------------------------------------------------------------------


@given(TEXTS, st.sampled_from([1, 7, 1000]))
@settings(max_examples=250, deadline=None)
def test_the_longest_matches_are_those_found_by_comparing_everything(tokens: list[int], pieces: int) -> None:
    """Lengths in order, and for each length all the places (or the 8 longest and latest ones)."""
    history = indexed(tokens, pieces=pieces)
    known = common_suffixes(tokens, 64)
    ranked = sorted(known, key=lambda end: (-known[end], -end))[: suffix._MAX_ENDS]

    matches = history.matches(history.tokens, len(tokens))

    lengths = sorted({known[end] for end in ranked}, reverse=True)[: suffix._MAX_MATCHES]
    enough = [length for length in lengths if length >= suffix._ENOUGH]
    lengths = lengths[: lengths.index(enough[0]) + 1] if enough else lengths
    assert [match.length for match in matches] == lengths
    for match in matches:
        ends = [end for end in ranked if known[end] >= match.length]
        assert match.ends == [(end + 1, 1) for end in ends]  # one separator stands before the text


@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_of_equal_contexts_the_latest_speaks_for_all(tokens: list[int]) -> None:
    """Contexts alike in max_match tokens share one node: the latest place, as often as its successor followed."""
    history = indexed(tokens, max_match=4)
    known = common_suffixes(tokens, 4)
    distinct = {tuple(tokens[max(0, end - 3) : end + 1]): end for end in sorted(known)}
    ranked = sorted(distinct.values(), key=lambda end: (-known[end], -end))[: suffix._MAX_ENDS]

    matches = history.matches(history.tokens, len(tokens))

    lengths = sorted({known[end] for end in ranked}, reverse=True)[: suffix._MAX_MATCHES]
    assert [match.length for match in matches] == lengths
    for match in matches:
        assert [end - 1 for end, _ in match.ends] == [end for end in ranked if known[end] >= match.length]
    if matches and matches[0].length == 4:
        ((end, count),) = matches[0].ends
        latest = max(end for end, length in known.items() if length == 4)
        run = 0
        for place in sorted((end for end, length in known.items() if length == 4), reverse=True):
            if tokens[place + 1] != tokens[latest + 1]:
                break
            run += 1
        assert (end, count) == (latest + 1, run)


@given(TEXTS, TEXTS)
@settings(max_examples=150, deadline=None)
def test_another_text_is_matched_like_the_own_one(past: list[int], tokens: list[int]) -> None:
    """Looking a text up in a store finds the longest suffix of it that goes on there."""
    store = FinishedOutputs(1000)
    store.add(np.array(past, np.int32))
    store.index(10_000)
    text = array("i", [-1, *tokens])
    best = 0
    if len(past) > suffix.MIN_MATCH:
        for end in range(len(past) - 1):
            length = 0
            while length <= end and length < len(tokens) and past[end - length] == tokens[-1 - length]:
                length += 1
            best = max(best, min(64, length))

    matches = store.matches(text, len(tokens))

    assert (matches[0].length if matches else 0) == (best if best >= 2 else 0)


def test_a_text_made_to_unbalance_the_index_costs_a_bounded_number_of_visits() -> None:
    """Rows that sort one behind the other, then one before them all: old rows are dropped, drafts go on."""
    rows = [token for row in range(1500) for token in (1000 + row, 5, 6)]
    history = History()
    history.begin(-1)
    history.extend(np.array([*rows, *[token for _ in range(50) for token in (7, 5, 6)]], np.int32))

    left = history.index(1_000_000)

    # Each token counts as one, each node met as one more.
    assert 1_000_000 - left <= len(history.tokens) * (1 + suffix._MAX_VISITS)
    assert history.matches(history.tokens, len(history.tokens) - 1)[0].length == 64


# -- trees -----------------------------------------------------------------------------------------------


@given(TEXTS, st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_every_draft_is_a_topological_tree_with_its_spine_first(tokens: list[int], max_nodes: int) -> None:
    """Parents precede children, siblings differ, scores are probabilities, the likeliest path is nodes 1..k."""
    tree = draft(tokens, max_nodes=max_nodes)
    if tree is None:
        assert not common_suffixes(tokens, 64)
        return

    assert 1 <= tree.num_drafted <= max_nodes
    assert tree.tokens[0] == tokens[-1]
    assert tree.sources.tolist() == [SOURCE_TARGET] + [SOURCE_SUFFIX] * tree.num_drafted
    parents = (tree.parents[1:] - 1).tolist()
    assert is_tree(tree.tokens[1:].tolist(), parents, tree.scores[1:].tolist(), 4)
    assert (tree.scores > 0).all()
    edges = list(zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True))
    assert len(set(edges)) == len(edges)
    products = [1.0]
    for node in range(1, len(tree)):
        products.append(products[tree.parents[node]] * float(tree.scores[node]))
    children = {p: [n for n in range(1, len(tree)) if tree.parents[n] == p] for p in range(len(tree))}
    node = num_spine = 0
    while children[node]:
        num_spine += 1
        assert num_spine in children[node]
        assert products[num_spine] >= max(products[n] for n in children[node]) - 1e-6
        node = num_spine
    others = products[num_spine + 1 :]
    assert all(a >= b - 1e-6 for a, b in itertools.pairwise(others))


@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_every_path_is_copied_from_somewhere(tokens: list[int]) -> None:
    """A path continues an earlier occurrence of the last two tokens, in circles if it reaches the end."""
    tree = draft(tokens)
    if tree is None:
        return
    pasts = []
    for end in common_suffixes(tokens, 64):
        period = len(tokens) - 1 - end
        pasts.append([tokens[end + 1 + at % period] for at in range(16)])

    for node in range(1, len(tree)):
        path = path_to(tree, node)
        assert any(past[: len(path)] == path for past in pasts)


def test_a_copied_span_is_proposed_in_full() -> None:
    """One earlier occurrence and no other: max_nodes of what followed it, more and more certain."""
    span = list(range(100, 140))

    tree = draft([*span, 7, 8, 9, *span[:5]], max_nodes=16)

    assert tree is not None
    assert tree.tokens.tolist() == span[4:21]
    assert tree.parents.tolist() == list(range(-1, 16))
    assert (np.diff(tree.scores[1:]) > 0).all()
    assert tree.scores[1] == pytest.approx(2 / (2 + 6 / 5))


def test_a_longer_match_is_believed_more() -> None:
    """The same single occurrence scores higher the more of its context is shared."""
    span = list(range(100, 150))
    firsts = []
    for length in (2, 4, 8, 16, 32):
        tree = draft([*span, 7, *span[:length]])
        assert tree is not None
        firsts.append(float(tree.scores[1]))

    assert firsts == sorted(firsts)
    assert firsts[0] == pytest.approx(0.4) and firsts[-1] > 0.9


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2, 3, 4], [1, 2, 3, 4, 9, 4], list(range(200))])
def test_there_is_no_draft_without_a_match(tokens: list[int]) -> None:
    """One token alone, or a pair never seen before, is no ground to copy anything."""
    assert draft(tokens) is None


def test_a_loop_is_drafted_past_the_end_of_what_is_known() -> None:
    """A copy that reaches the end of the text goes on with what it copied."""
    for loop in ([5], [5, 6], [5, 6, 7, 8, 9]):
        text = [1, 2, 3, *(loop * 40)]

        tree = draft(text, max_nodes=12)

        assert tree is not None
        assert tree.tokens[1:].tolist() == (loop * 12)[:12]
        assert tree.scores[1:].min() > 0.9


def test_of_two_continuations_the_latest_comes_first_and_both_are_drafted() -> None:
    """Equal counts: recency decides. More counts: they do."""
    once = [1, 2, 3, 50, 9, 1, 2, 3, 60, 8, 1, 2, 3]
    twice = [11, 1, 2, 3, 50, 12, 1, 2, 3, 50, 13, 1, 2, 3, 50, 14, 1, 2, 3, 60, 15, 1, 2, 3]

    latest, oftenest = draft(once), draft(twice)

    assert latest is not None and oftenest is not None
    assert latest.tokens[1] == 60 and oftenest.tokens[1] == 50
    for tree in (latest, oftenest):
        assert {int(tree.tokens[n]) for n in range(1, len(tree)) if tree.parents[n] == 0} == {50, 60}


def test_matches_of_several_lengths_become_one_tree() -> None:
    """What the longest match says comes first; what only a shorter one knows hangs beside it."""
    text = [1, 2, 3, 4, 50, 51, 9, 8, 3, 4, 60, 61, 9, 1, 2, 3, 4]

    tree = draft(text)

    assert tree is not None
    paths = [path_to(tree, node) for node in range(1, len(tree))]
    assert paths[0] == [50] and [60] in paths and [60, 61] in paths


# -- streams ---------------------------------------------------------------------------------------------


@given(TEXTS, st.lists(st.integers(1, 9), max_size=12))
@settings(max_examples=80, deadline=None)
def test_a_stream_that_grew_drafts_like_one_opened_now(tokens: list[int], steps: list[int]) -> None:
    """Indexing as tokens come and indexing at once give the same trees, wherever drafts were asked for."""
    drafter = SuffixDrafter()
    one = stream("one", tokens[:1])
    drafter.open(one)
    for step in steps:
        drafter.propose([one])
        one.append(tokens[one.num_tokens : one.num_tokens + step])
        drafter.observe([one])
        known = tokens[: one.num_tokens]

        grown, fresh = drafter.propose([one])[0], draft(known)

        assert (grown is None) == (fresh is None)
        if grown is not None and fresh is not None:
            assert grown.tokens.tolist() == fresh.tokens.tolist()
            assert grown.parents.tolist() == fresh.parents.tolist()
            assert grown.scores.tolist() == fresh.scores.tolist()


def test_streams_in_any_order_leave_nothing_behind() -> None:
    """Opened, preempted, resumed, closed before the first draft, closed twice, never opened: all forgotten."""
    choose = random.Random(5)
    drafter = SuffixDrafter(max_store_tokens=300)
    running: dict[str, Stream] = {}
    for turn in range(400):
        what = choose.randrange(5)
        name = f"s{choose.randrange(12)}"
        if what == 0 and name not in running:
            resumed = [choose.randrange(4) for _ in range(choose.randrange(1, 30))]
            running[name] = stream(name, resumed, num_prompt=1)
            drafter.open(running[name])
        elif what == 1 and name in running:
            running[name].num_computed = 0  # preempted: its tokens stay
        elif what == 2:
            drafter.close(running.pop(name, stream(name, [1])))
        elif running:
            some = choose.sample(sorted(running), choose.randrange(1, len(running) + 1))
            trees = drafter.propose([running[key] for key in some])
            assert len(trees) == len(some)
            for key in some:
                running[key].append([choose.randrange(4) for _ in range(1 + turn % 3)])
            drafter.observe([running[key] for key in some])
    for left in list(running.values()):
        drafter.close(left)
        drafter.close(left)

    assert drafter._indexed == {}
    assert drafter.store.num_tokens <= 300
    assert drafter.propose([stream("never", [1, 2, 1, 2])]) == [None]
    assert drafter.version(stream("never", [1])) == ""


def test_opening_costs_nothing_and_a_long_prompt_is_indexed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step waits for a whole prompt: its stream is silent until the index caught up, the others draft on."""
    monkeypatch.setattr(suffix, "_WORK_PER_CALL", 2000)
    drafter = SuffixDrafter()
    short, long = stream("short", [1, 2, 3, 1, 2]), stream("long", [*range(3000), 1, 2])
    drafter.open(short)
    drafter.open(long)
    assert drafter._indexed == {short.key: None, long.key: None}

    trees = [drafter.propose([short, long]) for _ in range(3)]

    assert all(pair[0] is not None for pair in trees)
    assert trees[0][1] is None and trees[2][1] is not None


def test_only_the_end_of_a_very_long_stream_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies further back than the cap is not searched."""
    monkeypatch.setattr(suffix, "_MAX_CONTEXT", 50)

    assert draft([1, 2, 3, *range(10, 100), 1, 2]) is None
    assert draft([*range(10, 100), 1, 2, 3, 1, 2]) is not None


# -- finished outputs ------------------------------------------------------------------------------------


def test_what_one_stream_wrote_another_drafts_once_the_first_has_ended() -> None:
    """Not before it ended, not its prompt, and not past the end of its output."""
    drafter = SuffixDrafter()
    first, second = stream("first", [70, 71, 72, 1, 2, 3, 4, 5], num_prompt=3), stream("second", [9, 1, 2])
    for one in (first, second):
        drafter.open(one)

    before = drafter.propose([second])[0]
    drafter.close(first)
    after = drafter.propose([second])[0]
    second.append([70, 71])
    drafter.observe([second])

    assert before is None
    assert after is not None and after.tokens.tolist() == [2, 3, 4, 5]
    assert drafter.propose([second])[0] is None


def test_texts_in_the_store_never_run_into_each_other() -> None:
    """The end of one output and the start of the next are not a context, nor is one a continuation of the other."""
    drafter = SuffixDrafter()
    finish(drafter, "a", [1, 2, 3])
    finish(drafter, "b", [4, 5, 6])
    finish(drafter, "c", [1, 2, 3])
    finish(drafter, "d", [2, 3, 7])
    for tokens, follow in (([1, 2], [3]), ([3, 4], None), ([4, 5], [6]), ([5, 6], None), ([2, 3], [7])):
        one = stream("q", tokens)
        drafter.open(one)
        tree = drafter.propose([one])[0]

        assert (tree and tree.tokens[1:].tolist()) == follow


def test_nothing_is_copied_across_tenants() -> None:
    """The same context, another tenant: no draft."""
    drafter = SuffixDrafter(tenant_of=lambda one: one.request.id.partition("-")[0])
    finish(drafter, "red-1", [1, 2, 3, 4, 5, 6])
    red, blue = stream("red-2", [1, 2, 3]), stream("blue-1", [1, 2, 3])
    for one in (red, blue):
        drafter.open(one)

    trees = drafter.propose([red, blue])

    assert trees[0] is not None and trees[0].tokens[1:].tolist() == [4, 5, 6]
    assert trees[1] is None


def test_the_oldest_outputs_go_when_there_are_too_many_tokens() -> None:
    """Whoever wrote them: the cap holds for all tenants together, and what is left can still be found."""
    store = FinishedOutputs(1000)
    for turn in range(300):
        tokens = [10_000 + turn, *range(10 * turn, 10 * turn + 20), 1, 2, turn]
        store.add(np.array(tokens, np.int32), f"tenant{turn % 3}")
        store.index(100_000)

    def finds(turn: int) -> bool:
        return bool(store.matches(array("i", [-1, 10_000 + turn, 10 * turn]), 2, f"tenant{turn % 3}"))

    assert store.num_tokens <= 1000
    kept = [turn for turn in range(300) if finds(turn)]
    assert kept == list(range(300 - len(kept), 300)) and len(kept) == 1000 // 25
    for history in store._histories.values():
        held = len(history)
        assert len(history.tokens) <= 2 * held
        assert len(history._newest) <= held
        assert len(history._links) == 2 * len(history.tokens) == 2 * len(history._counts)


def test_a_tenant_whose_outputs_are_all_gone_is_forgotten() -> None:
    """Names of tenants are not kept longer than their texts."""
    store = FinishedOutputs(100)
    for turn in range(50):
        store.add(np.arange(30, dtype=np.int32), f"tenant{turn}")

    assert list(store._histories) == ["tenant47", "tenant48", "tenant49"]
    store.index(10_000)
    assert not store._unindexed


@given(st.lists(TEXTS, min_size=1, max_size=12), TEXTS)
@settings(max_examples=80, deadline=None)
def test_forgetting_leaves_the_matches_of_what_is_left(pasts: list[list[int]], tokens: list[int]) -> None:
    """A store that evicted finds what one that never saw the evicted texts would find."""
    store, other = FinishedOutputs(120), FinishedOutputs(10_000)
    kept: list[list[int]] = []
    for past in pasts:
        store.add(np.array(past, np.int32))
        store.index(100_000)
        if len(past) > suffix.MIN_MATCH:
            kept.append(past)
            while sum(len(text) + 1 for text in kept) > 120:
                kept.pop(0)
    for past in kept:
        other.add(np.array(past, np.int32))
    other.index(100_000)
    text = array("i", [-1, *tokens])

    found = store.matches(text, len(tokens))
    expected = other.matches(text, len(tokens))

    assert [match.length for match in found] == [match.length for match in expected]
    assert [match.pasts(-1, 8) for match in found] == [match.pasts(-1, 8) for match in expected]


def test_a_store_without_room_keeps_nothing_of_a_finished_stream() -> None:
    """What nobody agreed to keep must not turn up in another stream's draft."""
    drafter = SuffixDrafter(max_store_tokens=0)
    finish(drafter, "first", list(range(40, 90)))
    other = stream("second", list(range(40, 60)))
    drafter.open(other)

    assert drafter.propose([other]) == [None]
    assert drafter.store.num_tokens == 0


# -- the engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A random model: greedy, it soon repeats itself."""
    folder = harness.tiny_model(tmp_path_factory.mktemp("target"), seed=3)
    return ModelRunner(load_model(folder, load_model_config(folder)), "v", num_blocks=256, block_size=4)


def generate(
    runner: ModelRunner, requests: Sequence[Request], drafter: SuffixDrafter | None
) -> tuple[dict[str, list[int]], int]:
    """Texts, and in how many steps."""
    engine = Engine(runner, token_budget=128, max_streams=8, drafter=drafter)
    texts: dict[str, list[int]] = {asked.id: [] for asked in requests}
    for asked in requests:
        engine.add(asked)
    num_steps = 0
    while len(engine.scheduler):
        num_steps += 1
        for emission in engine.step().emissions:
            texts[emission.stream.request.id].extend(emission.tokens)
    engine.scheduler.check_integrity()
    return texts, num_steps


def test_text_is_that_of_plain_decoding_and_takes_fewer_steps(runner: ModelRunner) -> None:
    """Greedy and sampled streams together; the greedy ones run into loops, which are copied."""
    requests = [
        harness.request("greedy", harness.prompt(9, 1), 80),
        harness.request("repeats", harness.prompt(6, 2) * 4, 60),
        harness.request("sampled", harness.prompt(12, 3) * 2, 60, temperature=0.8),
        harness.request("cold", harness.prompt(12, 4), 60, temperature=0.2, seed=9),
    ]
    drafter = SuffixDrafter()

    plain, num_plain = generate(runner, requests, None)
    drafted, num_drafted = generate(runner, requests, drafter)

    assert drafted == plain
    assert num_drafted <= num_plain
    assert drafter._indexed == {}
    assert drafter.store.num_tokens == sum(len(text) + 1 for text in plain.values())


def test_a_looping_output_takes_less_than_half_as_many_steps_as_tokens(runner: ModelRunner) -> None:
    """Once the loop is seen, each step commits many tokens of it."""
    asked = harness.request("greedy", harness.prompt(9, 1), 160)

    plain, _ = generate(runner, [asked], None)
    drafted, num_steps = generate(runner, [asked], SuffixDrafter())

    assert drafted == plain
    assert num_steps < len(drafted["greedy"]) / 2


def test_the_same_request_again_is_copied_from_its_first_run(runner: ModelRunner) -> None:
    """Sampled text does not loop, but it is the same again for the same seed."""
    drafter = SuffixDrafter()
    again = harness.request("again", harness.prompt(9, 5), 80, temperature=1.0)

    first, num_first = generate(runner, [again], drafter)
    second, num_second = generate(runner, [again], drafter)

    assert first == second
    assert num_second < num_first / 2
