"""Decisions against sums over all texts of a toy, intervals against many repetitions, and every rule with its reason."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from paceline.cluster.learning.config import GateConfig
from paceline.cluster.learning.counterfactual import Children, Costs, Policy, Scores, Times, count_steps
from paceline.cluster.learning.gate import (
    GateReport,
    Interval,
    charged,
    confirmed,
    decide,
    median_of,
    order,
    saving_of,
)

VOCAB, LENGTH, DEPTH = 3, 6, 3
POLICY = Policy(depth=DEPTH, width=1, floor=0.0, control="fixed", sources=("draft",))
COSTS = Costs((1, 2, 4, 8), (1.0, 1.02, 1.1, 1.3), (1, 2), (0.2, 0.22))
FloatArray = npt.NDArray[np.float64]


# --- a toy: three tokens, texts of six, models of the last two tokens ------------------------------------


def toy(seed: int, sharpness: float, base: FloatArray | None = None, weight: float = 0.0) -> FloatArray:
    """float64 [V + 1, V + 1, V]: the next token's distribution behind any two; V stands for "none"."""
    logits = np.random.default_rng(seed).normal(size=(VOCAB + 1, VOCAB + 1, VOCAB)) * sharpness
    if base is not None:
        logits = weight * np.log(base) + (1 - weight) * logits
    exps = np.exp(logits)
    probs: FloatArray = exps / exps.sum(axis=-1, keepdims=True)
    return probs


TARGET = toy(1, 1.5)
CHAMPION = toy(2, 1.0, TARGET, 0.5)
CANDIDATE = toy(3, 1.0, TARGET, 0.7)


def agreed(p: FloatArray, q: FloatArray) -> FloatArray:
    """P(both draw v with the same noise), for each v: 1 / sum_w max(p_w / p_v, q_w / q_v)."""
    return 1.0 / np.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None]).sum(axis=1)


def enumerated(draft: FloatArray) -> tuple[float, float]:
    """Expected steps and seconds of a text, summed over all texts and all ways of being right or wrong."""
    times = Times(POLICY, COSTS)

    def behind(prefix: tuple[int, ...]) -> tuple[int, int]:
        padded = (VOCAB, VOCAB, *prefix)
        return padded[-2], padded[-1]

    def step(prefix: tuple[int, ...], num_new: int) -> FloatArray:
        left = LENGTH - len(prefix)
        levels = DEPTH if left > 1 else 0
        rows = min(levels, left - 1)
        late = times.caught_up_s * (num_new == 2 and levels > 0)
        return np.asarray([1.0, times.forward_s[rows] + times.other_s + times.draft_s[levels] + late])

    @cache
    def begin(prefix: tuple[int, ...], num_new: int) -> tuple[float, ...]:
        if len(prefix) == LENGTH:
            return (0.0, 0.0)
        return tuple(step(prefix, num_new) + np.asarray(go_on(prefix, 0)))

    @cache
    def go_on(prefix: tuple[int, ...], num_right: int) -> tuple[float, ...]:
        if len(prefix) == LENGTH:
            return (0.0, 0.0)
        p, q = TARGET[behind(prefix)], draft[behind(prefix)]
        total = np.zeros(2)
        if num_right == DEPTH:  # the token behind a whole chain is the target's
            for v in range(VOCAB):
                total += p[v] * np.asarray(begin((*prefix, v), 2))
            return tuple(total)
        both = agreed(p, q)
        for v in range(VOCAB):
            total += both[v] * np.asarray(go_on((*prefix, v), num_right + 1))
            total += (p[v] - both[v]) * np.asarray(begin((*prefix, v), 1))
        return tuple(total)

    steps, seconds = begin((), 1)
    return steps, seconds


def drawn(num: int, drafts: list[FloatArray], seed: int) -> list[list[Children]]:
    """`num` texts of the target, and each draft's children along them, drawn with the same noise."""
    rng = np.random.default_rng(seed)
    noise = rng.gumbel(size=(num, LENGTH, VOCAB))
    context = np.full((num, 2), VOCAB)
    tokens = np.empty((num, LENGTH), np.int64)
    ids = np.empty((len(drafts), num, LENGTH, 1), np.int64)
    for at in range(LENGTH):
        tokens[:, at] = (np.log(TARGET[context[:, 0], context[:, 1]]) + noise[:, at]).argmax(axis=1)
        for which, draft in enumerate(drafts):
            scores = np.log(draft[context[:, 0], context[:, 1]]) + noise[:, at]
            ids[which, :, at, 0] = scores.argmax(axis=1)
        context = np.stack([context[:, 1], tokens[:, at]], axis=1)
    ones = np.ones((LENGTH, 1), np.float32)
    return [
        [Children(f"r{i}", "toy", tokens[i], ids[which, i], ones) for i in range(num)]
        for which in range(len(drafts))
    ]


@pytest.fixture(scope="module")
def pool() -> tuple[Scores, Scores]:
    """Champion and candidate on 4,000 texts."""
    one, other = drawn(4000, [CHAMPION, CANDIDATE], seed=7)
    return Scores.build("one", one, POLICY, COSTS), Scores.build("other", other, POLICY, COSTS)


def test_steps_and_seconds_are_those_of_the_sum_over_all_texts(pool: tuple[Scores, Scores]) -> None:
    """Both drafts, on texts that neither had a part in."""
    for scores, draft in zip(pool, (CHAMPION, CANDIDATE), strict=True):
        steps, seconds = enumerated(draft)
        error = 4 / len(scores.steps) ** 0.5

        assert abs(scores.steps.mean() - steps) < error * scores.steps.std()
        assert abs(scores.seconds.mean() - seconds) < error * scores.seconds.std()


def test_noise_of_its_own_would_be_noticed() -> None:
    """Negative control: a draft that draws apart from the target takes more steps than the sum says."""
    (apart,) = drawn(1500, [CHAMPION], seed=1)
    (texts,) = drawn(1500, [CHAMPION], seed=2)
    mixed = [replace(a, tokens=b.tokens) for a, b in zip(apart, texts, strict=True)]
    steps, _ = enumerated(CHAMPION)

    assert Scores.build("x", mixed, POLICY, COSTS).steps.mean() > 1.1 * steps


def test_the_interval_holds_the_true_saving_in_95_of_100_repetitions(pool: tuple[Scores, Scores]) -> None:
    """The truth is that of all texts; each repetition sees 100 of them."""
    one, other = (scores.seconds for scores in pool)
    truth = 1 - other.sum() / one.sum()
    exact = 1 - enumerated(CANDIDATE)[1] / enumerated(CHAMPION)[1]
    rng = np.random.default_rng(0)
    inside = above = 0
    for seed in range(200):
        picked = rng.integers(0, len(one), 100)
        interval, bound = saving_of(one[picked], other[picked], seed=seed, error=0.0125)
        inside += interval.lo <= truth <= interval.hi
        above += bound > truth

    assert abs(truth - exact) < 0.01
    assert 0.91 <= inside / 200 <= 0.985
    assert above <= 8  # 1.25 % of 200 are 2.5


def test_steps_of_one_text_are_not_independent_draws() -> None:
    """Negative control: requests differ, so an interval from single steps instead of requests is far too narrow."""
    rng = np.random.default_rng(3)
    requests = rng.normal(0.05, 0.2, 400)  # each one's own saving
    one = np.full((400, 20), 1.0)
    other = one * (1 - requests[:, None]) + rng.normal(0, 0.05, one.shape)
    by_request, _ = saving_of(one.sum(axis=1), other.sum(axis=1), seed=0)
    by_step, _ = saving_of(one.ravel(), other.ravel(), seed=0)

    assert by_request.hi - by_request.lo > 3 * (by_step.hi - by_step.lo)


# --- rules ----------------------------------------------------------------------------------------------


def scores(version: str, seconds: FloatArray, domains: list[str] | None = None) -> Scores:
    """A version that took so long for each text."""
    num = len(seconds)
    return Scores(
        version,
        tuple(f"r{i}" for i in range(num)),
        tuple(domains or ["a"] * num),
        np.full(num, 100),
        np.full(num, 40),
        seconds,
        np.tile([40, 30], (num, 1)),
        np.tile([30, 20], (num, 1)),
    )


def pair(gains: FloatArray, domains: list[str] | None = None, *, seed: int = 0) -> tuple[Scores, Scores]:
    """Champion and candidate; the candidate saves such a share of each text, give or take."""
    rng = np.random.default_rng(seed)
    one = rng.uniform(0.5, 2.0, len(gains))
    return scores("old", one, domains), scores(
        "new", one * (1 - gains + rng.normal(0, 0.05, len(gains))), domains
    )


def judged(one: Scores, other: Scores, **how: object) -> GateReport:
    config = GateConfig()
    return decide(one, other, config, at=5.0, policy=POLICY, costs=COSTS, **how)  # type: ignore[arg-type]


def test_a_better_candidate_passes() -> None:
    report = judged(*pair(np.full(300, 0.05)), slowdown=Interval(1.0, 0.98, 1.03))

    assert report.passed and report.version == "new" and report.champion == "old"
    assert 0.04 < report.saving.lo < report.saving.mean < report.saving.hi < 0.06
    assert report.bound < report.saving.lo  # the first look spends half of its error
    assert report.champion_acceptance == pytest.approx(50 / 70)
    assert report.num_requests == 300 and report.num_tokens == 30_000


@pytest.mark.parametrize(
    ("gain", "how", "words"),
    [
        (0.0, {}, "surely only"),
        (-0.03, {}, "domain a: saving -3"),
        (-0.01, {}, "the limit is 1.0%"),
        (
            0.05,
            {"slowdown": Interval(1.1, 1.08, 1.12)},
            "its forward takes 1.100 times the champion's, surely 1.080",
        ),
        (0.05, {"slowdown": Interval(np.nan, np.nan, np.nan)}, "its forward takes nan"),
        (0.012, {"look": 20}, "at look 20"),
    ],
)
def test_each_rule_says_why(gain: float, how: dict[str, object], words: str) -> None:
    report = judged(*pair(np.full(300, gain)), **how)

    assert not report.passed
    assert words in report.reason


def test_a_forgotten_domain_is_not_outweighed_by_the_others() -> None:
    """Overall far better, one domain 10 % worse: refused, by its name. Few requests of a domain say nothing."""
    domains = ["common"] * 280 + ["rare"] * 20
    gains = np.asarray([0.1] * 280 + [-0.1] * 20)
    report = judged(*pair(gains, domains))

    assert not report.passed and "domain rare" in report.reason
    assert [d.domain for d in report.domains if not d.passed] == ["rare"]
    assert judged(*pair(gains[:285], domains[:285])).passed


def test_too_few_requests_decide_nothing() -> None:
    report = judged(*pair(np.full(50, 0.3)))

    assert not report.passed and "too few held-out requests: 50, expected at least 100" in report.reason
    assert not judged(*pair(np.empty(0))).passed


def test_a_candidate_that_cannot_be_timed_is_refused() -> None:
    one, other = pair(np.full(200, 0.1))
    other.seconds[:] = np.nan

    assert not judged(one, other).passed


def test_many_candidates_of_no_worth_do_not_get_a_lucky_draw() -> None:
    """8 looks at one held-out set with savings exactly at the limit: all together pass less often than one may."""
    config = GateConfig(min_saving=0.0)
    num_lucky = 0
    for repetition in range(20):
        rng = np.random.default_rng(repetition)
        one = rng.uniform(0.5, 2.0, 150)
        for look in range(1, 9):
            other = one * (1 + rng.normal(0, 0.1, 150))
            report = decide(
                scores("a", one), scores("b", other), config, at=0.0, policy=POLICY, look=look, seed=look
            )
            num_lucky += report.passed

    assert num_lucky <= 3  # 2.5 % of 20 held-out sets; without spending it would be 2.5 % of 160 looks


def test_only_a_sure_slowdown_is_charged_and_only_a_smaller_model_is_faster() -> None:
    """Noise of a busy machine is neither a reason to refuse nor a saving."""
    rng = np.random.default_rng(0)
    noisy = median_of(rng.lognormal(-0.02, 0.2, 60).tolist(), seed=0)

    assert charged(noisy) == 1.0
    assert charged(Interval(1.1, 1.05, 1.15)) == 1.05
    assert charged(Interval(0.5, 0.45, 0.6)) == 0.6
    assert judged(*pair(np.full(300, 0.05)), slowdown=Interval(1.04, 1.0, 1.08)).passed


def test_what_the_deployed_code_contradicts_does_not_pass() -> None:
    """Saved by the quick form, lost where suffixes had it all anyway; saved there too, it stands."""
    report = judged(*pair(np.full(300, 0.05)))

    lost = confirmed(report, *pair(np.full(100, -0.03), seed=1))
    kept = confirmed(report, *pair(np.full(100, 0.04), seed=1))

    assert report.passed and kept.passed and kept.deployed_saving is not None
    assert not lost.passed and "by the deployed code" in lost.reason


def test_the_report_survives_json() -> None:
    report = judged(*pair(np.full(120, 0.05)), slowdown=Interval(1.01, 1.0, 1.02))

    assert GateReport.decode(report.encode()) == report


def test_the_same_scores_give_the_same_report() -> None:
    one, other = pair(np.full(120, 0.05))

    assert judged(one, other, seed=3) == judged(one, other, seed=3)
    assert judged(one, other, seed=3) != judged(one, other, seed=4)


def test_versions_of_the_pool_are_ordered_by_what_they_save() -> None:
    one, other = pair(np.full(100, 0.2))
    ranked = order("old", [one, other])

    assert [r.version for r in ranked] == ["new", "old"]
    assert ranked[0].saving.lo > 0.15 and ranked[1].saving.mean == 0


# --- one text -------------------------------------------------------------------------------------------


def text(tokens: list[int], ids: list[list[int]], chances: list[list[float]]) -> Children:
    return Children("r", "", np.asarray(tokens), np.asarray(ids), np.asarray(chances, np.float32))


def test_a_chain_ends_behind_the_level_that_falls_below_the_floor() -> None:
    """0.6, 0.36, 0.216 < 0.3: three levels, though the fourth token was right as well."""
    times = Times(Policy(depth=8, width=1, floor=0.3, control="fixed"), COSTS)
    steps = count_steps(text([1] * 9, [[1]] * 9, [[0.6]] * 9), times)

    assert steps.num_steps == 3  # 3 + 1, 3 + 1, 0 + 1
    assert steps.tested.tolist()[:4] == [2, 2, 2, 0]


def test_an_alternative_ends_the_chain() -> None:
    """The second child was right at the first level: one accepted, nothing tested behind it."""
    times = Times(Policy(depth=4, width=2, floor=0.0, control="fixed"), COSTS)
    ids = [[9, 1], [1, 9], [1, 9], [1, 9]]
    steps = count_steps(text([1] * 4, ids, [[0.5, 0.4]] * 4), times)

    assert steps.num_steps == 2  # the alternative and a token; then one and the last
    assert steps.accepted.tolist() == [2, 0, 0, 0] and steps.tested.tolist() == [2, 0, 0, 0]


def test_a_filtered_child_is_no_node() -> None:
    times = Times(Policy(depth=4, width=2, floor=0.0, control="fixed"), COSTS)
    steps = count_steps(text([1] * 2, [[9, 1]] * 2, [[1.0, 0.0]] * 2), times)

    assert steps.num_steps == 2


def test_a_draft_that_does_not_pay_is_not_asked() -> None:
    """Always wrong: under the controller it costs nothing, asked in every step it does."""
    wrong = text([1] * 20, [[9]] * 20, [[0.9]] * 20)
    measured, fixed = (
        count_steps(wrong, Times(Policy(depth=4, width=1, control=control), COSTS))
        for control in ("measured", "fixed")
    )

    assert measured.num_steps == fixed.num_steps == 20
    assert measured.seconds == pytest.approx(20.0) and fixed.seconds > 25
