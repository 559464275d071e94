"""Simulated streams of two versions -> promoted, taken back or left alone; error rates by simulation."""

from collections.abc import Iterator, Sequence
from types import MappingProxyType

import numpy as np
import pytest

from paceline.cluster.learning.config import RolloutConfig
from paceline.cluster.learning.rollout import PATIENCE, PREPARE_S, Change, Lane, Refused, Rollout
from paceline.cluster.learning.routing import version_for
from paceline.cluster.learning.trial import Trial
from paceline.cluster.types import DraftPlan, DraftRef, ServedStream

CONFIG = RolloutConfig(
    canary_share=0.2, canary_min_requests=100, canary_max_s=600, watch_s=300, backoff_s=100
)
REFS = {name: DraftRef(name, f"/drafts/{name}") for name in ("base", "new", "third", "law")}
SPEED = MappingProxyType({"base": 3.0})


def stream(
    rng: np.random.Generator, version: str, level: float, *, request_id: str = "r", tenant: str = "t", domain: str = "", spt: float = 0.01,
    drafted: bool = True,
) -> ServedStream:  # fmt: skip
    """One stream of so many tokens per step, roughly; or of one token per step, and no draft tried."""
    steps = int(rng.integers(3, 60))
    tokens = max(steps, round(steps * max(1.05, level * (1 + rng.normal(0, 0.2)))))
    seconds = max(1, tokens - 1) * spt * max(0.2, 1 + rng.normal(0, 0.3))
    gap = 0.01 + float(rng.exponential(0.03))
    if not drafted:
        return ServedStream(
            request_id, tenant, domain, "", steps, steps, (), (), seconds * steps / tokens, gap
        )
    hits = min(steps, tokens - steps)
    return ServedStream(request_id, tenant, domain, version, tokens, steps, (steps,), (hits,), seconds, gap)


class World:
    """A rollout, the streams it sees, and draft workers that hold what they are told at once."""

    def __init__(self, seed: int = 0, config: RolloutConfig = CONFIG) -> None:
        self.rng = np.random.default_rng(seed)
        self.rollout = Rollout(config, "base", 0.0)
        self.now = 0.0
        self.num = 0
        self.log: list[Change] = []

    @property
    def plan(self) -> DraftPlan:
        return self.rollout.plan(1, "target", REFS)

    def kinds(self) -> list[str]:
        return [change.kind for change in self.log]

    def loaded(self) -> None:
        self.log += self.rollout.advance(set(REFS), {}, self.now)

    def serve(self, num: int, levels: dict[str, float], **how: object) -> int:
        """Streams, ten a second, as the plan in force has them drafted for -> how many until something changed."""
        for i in range(num):
            self.num += 1
            self.now += 0.1
            plan, request_id = self.plan, f"req-{self.num}"
            version = version_for(plan, request_id, str(how.get("tenant", "t")), str(how.get("domain", "")))
            one = stream(self.rng, version, levels[version], request_id=request_id, **how)  # type: ignore[arg-type]
            changes = self.rollout.served([one], plan, self.now)
            self.log += changes
            if changes:
                return i + 1
        return num


def offered(seed: int = 0, **how: object) -> World:
    world = World(seed, CONFIG.model_copy(update=how))
    world.log += world.rollout.offer("new", "", 0.0)
    return world


def test_a_better_candidate_goes_live_and_is_kept() -> None:
    """Prepared everywhere, a share of streams, promoted, compared with its predecessor, kept."""
    world = offered()
    assert world.plan.resident[1].version == "new" and not world.plan.canary
    world.loaded()
    assert (world.plan.canary, world.plan.canary_share, world.plan.live) == ("new", 0.2, "base")

    levels = {"base": 2.0, "new": 3.0}
    world.serve(3000, levels)
    assert (
        world.plan.live == "new" and world.plan.canary == "base"
    )  # the predecessor keeps a share: the control
    world.serve(4000, levels)

    assert world.kinds() == ["preparing", "canary", "promoted", "kept"]
    assert world.plan.live == "new" and not world.plan.canary
    assert "base" in [ref.version for ref in world.plan.resident]  # a roll-back is one switch away


def test_nobody_gets_a_version_that_not_all_draft_workers_hold() -> None:
    """Resident first, then the canary; a worker that refuses it ends the rollout with its reason."""
    world = offered()
    assert world.rollout.advance(["base"], {}, 5.0) == []
    assert not world.plan.canary

    (change,) = world.rollout.advance(["base"], {"new": "NaN in lm_head.weight"}, 6.0)

    assert change.kind == "aborted" and "NaN in lm_head.weight" in change.reason
    assert world.rollout.default.stage == "steady" and world.rollout.default.frozen_until == 0
    late = offered()
    assert late.rollout.advance(["base"], {}, PREPARE_S - 1) == []
    assert late.rollout.advance(["base"], {}, PREPARE_S + 1)[0].kind == "aborted"


def test_a_worse_candidate_is_taken_back_before_its_time() -> None:
    """And training rests, twice as long after each further one."""
    world = offered()
    world.loaded()

    took = world.serve(3000, {"base": 3.0, "new": 2.4})

    assert world.kinds()[-1] == "rolled_back" and took < 600
    assert world.rollout.default.frozen_until == pytest.approx(world.now + 100)
    with pytest.raises(Refused, match="frozen"):
        world.rollout.offer("new", "", world.now)
    world.now = world.rollout.default.frozen_until
    world.log += world.rollout.offer("third", "", world.now)
    world.loaded()
    world.serve(3000, {"base": 3.0, "third": 2.4})
    assert world.rollout.default.frozen_until == pytest.approx(world.now + 200)


def test_one_that_turns_out_worse_is_taken_back_while_it_is_watched() -> None:
    """It was fine in its canary; then it is not. Detected on a batch of streams, done with the same call."""
    world = offered()
    world.loaded()
    world.serve(3000, {"base": 2.5, "new": 3.0})
    assert world.plan.live == "new"

    world.serve(2500, {"base": 3.0, "new": 2.4})

    assert world.log[-1].kind == "rolled_back" and world.log[-1].other == "base"
    assert world.plan.live == "base" and not world.plan.canary


def test_a_slower_candidate_is_taken_back_whatever_its_acceptance() -> None:
    """More tokens per step, and each of them takes 40 % longer."""
    world = offered()
    world.loaded()
    for _ in range(4000):
        world.num += 1
        plan = world.plan
        version = version_for(plan, f"r{world.num}", "t", "")
        slow = 0.014 if version == "new" else 0.01
        world.log += world.rollout.served(
            [stream(world.rng, version, 3.0, request_id=f"r{world.num}", spt=slow)], plan, 1.0
        )
        if world.log[-1].kind != "canary":
            break

    assert world.log[-1].kind == "rolled_back" and "take" in world.log[-1].reason


def equals(seed: int, share: float, num: int) -> Iterator[tuple[bool, ServedStream]]:
    """Streams of two equal versions, and whether each is the candidate's: as `stream` makes them, all at once."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(3, 60, num)
    tokens = np.maximum(steps, np.rint(steps * np.maximum(1.05, 3.0 * (1 + rng.normal(0, 0.2, num)))))
    seconds = np.maximum(1, tokens - 1) * 0.01 * np.maximum(0.2, 1 + rng.normal(0, 0.3, num))
    gaps = 0.01 + rng.exponential(0.03, num)
    columns = (rng.random(num) < share, tokens.astype(int), steps, seconds, gaps)
    for is_candidate, n, k, s, gap in zip(*(column.tolist() for column in columns), strict=True):
        yield is_candidate, ServedStream("r", "t", "", "c" if is_candidate else "l", n, k, (k,), (k,), s, gap)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_equal_versions_are_told_apart_wrongly_at_most_one_time_in_twenty(share: float) -> None:
    """100 trials of two equal versions, looked at again and again over 1,500 streams: errors at both sides together."""
    errors = 0
    for seed in range(100):
        trial = Trial("c", "l", 0.0)
        for i, (is_candidate, one) in enumerate(equals(seed, share, 1500)):
            trial.add(one, i, is_candidate=is_candidate)
            if i % 5 == 0 and trial.verdict()[0] != "open":
                errors += 1
                break

    assert errors <= 10  # 5 expected at most; 10 or more of them by chance 3 times in 100


def test_a_plain_test_at_each_look_would_err_much_more_often() -> None:
    """Negative control: a fixed 95 % interval, looked at as often, is wrong several times as often."""
    errors = 0
    for seed in range(60):
        trial = Trial("c", "l", 0.0)
        for i, (is_candidate, stream) in enumerate(equals(seed, 0.5, 1500)):
            trial.add(stream, i, is_candidate=is_candidate)
            one, other = trial.steps.candidate, trial.steps.control
            if i % 5 == 0 and min(one.num, other.num) >= 20:
                error = (one.variance + other.variance) ** 0.5
                if abs(one.value - other.value) > 1.96 * error:
                    errors += 1
                    break

    assert errors >= 15


def test_a_candidate_of_no_gain_passes_at_the_end_of_its_time_and_a_bad_one_does_not() -> None:
    """Not worse is enough there: the gate has found it better."""
    equal = offered(1, canary_min_requests=10_000, canary_max_s=60)
    equal.loaded()
    equal.serve(3000, {"base": 3.0, "new": 3.05})
    assert equal.kinds()[-1] == "promoted"
    unlucky = offered(1, canary_min_requests=10_000, canary_max_s=15)
    unlucky.loaded()
    unlucky.serve(3000, {"base": 3.0, "new": 2.7})
    assert unlucky.kinds()[-1] == "rolled_back"


def test_where_drafting_is_off_a_canary_waits_and_says_why() -> None:
    """Both arms have one token per step: not worse, and no evidence. It goes on as soon as drafts are tried again."""
    world = offered(canary_max_s=60)
    world.loaded()
    world.serve(1700, {"base": 3.0, "new": 3.0}, drafted=False)  # 170 s

    lane = world.rollout.default
    assert lane.stage == "canary" and lane.trial is not None and lane.trial.num > 300
    assert lane.trial.is_weak and lane.trial.view()["is_weak"]
    assert "drafts were tried in none of its" in lane.reason and "0 of 100" in lane.reason

    world.serve(1700, {"base": 2.0, "new": 3.0})

    assert world.kinds()[-1] == "promoted" and "weak" not in world.log[-1].reason


def test_with_drafting_off_for_good_it_goes_live_on_the_gates_word_and_is_watched_for_longer() -> None:
    """After three times its time; or never would a better draft come where a bad one has drafting switched off."""
    world = offered(canary_max_s=60, watch_s=30)
    world.loaded()
    levels = {"base": 3.0, "new": 3.0}

    world.serve(3000, levels, drafted=False)
    assert world.kinds()[-1] == "promoted" and world.now == pytest.approx(PATIENCE * 60, abs=1)
    assert world.log[-1].reason.startswith("weak evidence: drafts were tried in none of its")
    began = world.now
    world.serve(3000, levels, drafted=False)

    assert world.kinds()[-1] == "kept" and world.now - began == pytest.approx(PATIENCE * 30, abs=1)
    assert world.log[-1].reason.startswith("weak evidence")


def test_with_drafting_off_what_only_an_operator_vouches_for_does_not_go_live() -> None:
    """The gate may have refused it: without evidence it is a candidate as before, and nothing is frozen for it."""
    world = World(config=CONFIG.model_copy(update={"canary_max_s": 60}))
    world.log += world.rollout.offer("new", "", 0.0, actor="ops")
    world.loaded()

    world.serve(3000, {"base": 3.0, "new": 3.0}, drafted=False)

    assert world.kinds()[-1] == "aborted" and world.plan.live == "base"
    assert "weak evidence" in world.log[-1].reason and world.rollout.default.frozen_until == 0


def test_a_watch_without_evidence_still_takes_back_what_turns_out_worse() -> None:
    """Drafting comes back while it is watched for longer, and it is worse than its predecessor."""
    world = offered(canary_max_s=60, watch_s=120)
    world.loaded()
    levels = {"base": 3.0, "new": 2.2}
    world.serve(3000, levels, drafted=False)
    assert world.plan.live == "new"
    world.serve(1300, levels, drafted=False)
    assert world.rollout.default.stage == "watch" and "watched for longer" in world.rollout.default.reason

    world.serve(1500, levels)

    assert world.kinds()[-1] == "rolled_back" and world.plan.live == "base"


def test_without_traffic_a_canary_waits() -> None:
    """Time alone shows nothing."""
    world = offered()
    world.loaded()

    assert world.rollout.advance(set(REFS), {}, 1e6) == []
    assert world.rollout.default.stage == "canary"


def test_streams_of_other_versions_do_not_count() -> None:
    """They began before the canary did; and what was drawn for it and not drafted for at all does count."""
    world = offered()
    world.loaded()
    plan, trial = world.plan, world.rollout.default.trial
    assert trial is not None
    mine = [f"r{i}" for i in range(200) if version_for(plan, f"r{i}", "t", "") == "new"]
    rng = world.rng
    world.rollout.served([stream(rng, "base", 3, request_id=r) for r in mine], plan, 1.0)
    assert trial.num == 0
    world.rollout.served([stream(rng, "", 1, request_id=r, drafted=False) for r in mine], plan, 1.0)
    assert trial.num == len(mine) and trial.num_drafted == 0


def test_a_pinned_version_is_changed_by_nobody_but_operators() -> None:
    """Neither by a candidate nor by a roll-back of the loop."""
    world = World()
    world.rollout.pin("", actor="ops")
    with pytest.raises(Refused, match="pinned"):
        world.rollout.offer("new", "", 1.0)
    world.log += world.rollout.offer("new", "", 1.0, actor="ops", goal="live")
    world.loaded()
    assert world.plan.live == "new" and world.log[-1].actor == "ops"

    world.serve(1500, {"base": 3.0, "new": 2.0})
    assert world.plan.live == "new"
    (change,) = world.rollout.roll_back("", world.now, reason="ops says so", actor="ops")
    assert change.other == "base" and world.plan.live == "base"
    with pytest.raises(Refused, match="no version before"):
        world.rollout.roll_back("", world.now, reason="again", actor="ops")


def test_share_zero_promotes_at_once_and_watches_nobody() -> None:
    """No canary asked for: no control either."""
    world = offered(canary_share=0.0)
    world.loaded()

    assert world.kinds() == ["preparing", "promoted"] and world.plan.live == "new" and not world.plan.canary


def test_a_tag_gets_its_own_version_and_others_are_not_touched() -> None:
    """Its canary is drawn from its own streams; until it is live the tag follows everybody's version."""
    world = World()
    world.log += world.rollout.offer("law", "domain:law", 0.0)
    assert world.plan.routes == ()
    world.loaded()
    plan = world.plan
    assert plan.routes == (("domain:law", "base"),) and plan.canary_tag == "domain:law"
    others = {version_for(plan, f"r{i}", "t", "chat") for i in range(100)}
    assert others == {"base"} and {version_for(plan, f"r{i}", "t", "law") for i in range(100)} == {
        "base",
        "law",
    }

    world.serve(3000, {"base": 2.0, "law": 3.0}, domain="law")

    assert world.kinds() == ["preparing", "canary", "promoted"]
    assert world.plan.routes == (("domain:law", "law"),) and world.plan.live == "base"
    world.rollout.roll_back("domain:law", world.now, reason="", actor="ops")
    assert world.plan.routes == () and not world.rollout.lanes["domain:law"].has_own


def test_lanes_share_streams_one_after_the_other() -> None:
    """A second candidate waits until the first lane's comparison is over."""
    world = offered()
    world.loaded()
    world.log += world.rollout.offer("law", "tenant:a", world.now)
    world.loaded()

    assert world.plan.canary == "new" and world.rollout.lanes["tenant:a"].stage == "preparing"
    assert (
        world.rollout.advance(set(REFS), {}, world.now + 10 * PREPARE_S) == []
    )  # it waits, that is no failure
    world.rollout.roll_back("", world.now, reason="", actor="ops")
    world.loaded()
    assert world.plan.canary == "law" and world.plan.canary_tag == "tenant:a"


def test_a_revoked_version_leaves_at_once() -> None:
    """Where it is live the one before takes over, where it was to go live it does not."""
    world = offered(canary_share=0.0)
    world.loaded()
    world.rollout.offer("third", "", world.now, actor="ops")

    changes = world.rollout.drop("new", "base", world.now, reason="its data was deleted", actor="ops")

    assert [c.kind for c in changes] == ["dropped"] and world.plan.live == "base"
    assert [c.kind for c in world.rollout.drop("third", "base", 1.0, reason="", actor="ops")] == []


def test_another_target_makes_all_drafts_stale() -> None:
    """The configuration's draft serves: it is the only one that was made for it."""
    world = offered(canary_share=0.0)
    world.loaded()

    (change,) = world.rollout.restart("base", 9.0, "the target changed")

    assert change.version == "new" and world.plan.live == "base" and len(world.plan.resident) == 1


@pytest.mark.parametrize("stage", ["preparing", "canary", "watch"])
def test_a_lane_comes_back_after_a_restart(stage: str) -> None:
    """At any moment: what is live stays live, a candidate is prepared again, a watch goes on."""
    world = offered()
    if stage != "preparing":
        world.loaded()
    if stage == "watch":
        world.serve(3000, {"base": 2.0, "new": 3.0})

    lane = Lane.load("", world.rollout.default.save(), world.now + 5)

    expected = {"preparing": "preparing", "canary": "preparing", "watch": "watch"}[stage]
    assert lane.stage == expected and lane.live == world.rollout.default.live
    assert (lane.candidate == "new") == (stage != "watch")
    assert lane.trial is None or (lane.trial.candidate, lane.trial.control, lane.trial.num) == (
        "new",
        "base",
        0,
    )


def plan_versions(plan: DraftPlan) -> Sequence[str]:
    return [ref.version for ref in plan.resident]


def test_the_pool_fills_what_room_there_is() -> None:
    """What serves comes first; drafts of the pool only as far as `resident` allows."""
    world = World(config=CONFIG.model_copy(update={"resident": 2}))

    assert plan_versions(world.rollout.plan(1, "t", REFS, ["third", "law"])) == ["base", "third"]
