"""Traffic, drift and past runs -> train or do not, in words; streams served -> seconds that a run really saved."""

import pytest

from paceline.cluster.learning.figures import Cell, Figures
from paceline.cluster.learning.ledger import Ledger, tokens_per_step
from paceline.cluster.types import ServedStream


def cell(acceptance: float, steps: int = 1000) -> Cell:
    return Cell(
        requests=50,
        tokens=3 * steps,
        steps=steps,
        seconds=steps * 0.01,
        tested_by_depth=[1000],
        accepted_by_depth=[round(1000 * acceptance)],
    )


def busy(ledger: Ledger, share: float = 0.5) -> float:
    """Ten minutes of engines that step for this share of the time -> now."""
    for second in range(601):
        ledger.observe(share, round(share * 100), float(second))
    return 600.0


def ledger(**how: float) -> Ledger:
    values = {"horizon_h": 24.0, "margin": 1.5, "max_steps": 200, "depth": 8, **how}
    return Ledger(**values)  # type: ignore[arg-type]


def run(book: Ledger, name: str, saving: float | None, *, passed: bool, cpu_s: float = 100.0) -> None:
    book.begin(name, "", 0.0)
    book.update(name, spent_s=cpu_s, trained_cpu_s=0.8 * cpu_s, steps=200, gate_saving=saving, passed=passed)


def test_the_first_run_is_worth_a_try_where_acceptance_is_low() -> None:
    """And its prediction is a sum that an operator can check."""
    book = ledger()
    now = busy(book)

    decision = book.decide("", {"law": cell(0.4)}, {}, now)

    assert decision.train and "never trained" in decision.reason
    hoped = 0.5 * (1 - tokens_per_step(0.4, 8) / tokens_per_step(0.85, 8))
    assert decision.predicted_s == pytest.approx(hoped * 0.5 * 3600 * 24, rel=0.01)


def test_a_good_draft_is_left_alone() -> None:
    """Nothing that a run could reach: no run."""
    book = ledger()
    now = busy(book)

    decision = book.decide("", {"chat": cell(0.86)}, {}, now)

    assert not decision.train and decision.reason.startswith("do not train")
    assert book.view(now)["decisions"][""]["train"] is False


def test_stationary_traffic_ends_in_do_not_train() -> None:
    """Each run brings less than the last: the loop stops by itself, and stays so."""
    book = ledger()
    now = busy(book, 0.02)
    cells = {"chat": cell(0.7)}
    savings, runs = [0.08, 0.02, 0.004, -0.001, 0.001], 0
    while (decision := book.decide("", cells, {}, now)).train:
        run(book, f"run-{runs}", savings[runs], passed=savings[runs] > 0.01)
        runs += 1

    assert 1 <= runs <= 3 and not decision.train and "the last run brought" in decision.reason


def test_two_runs_in_a_row_without_gain_end_it_even_where_decoding_is_dear() -> None:
    """Noise of a refused run's estimate is no reason for another; drift is."""
    book = ledger()
    now = busy(book, 16.0)
    cells = {"chat": cell(0.6)}
    assert book.decide("", cells, {}, now).train
    run(book, "a", 0.009, passed=False)
    assert book.decide("", cells, {}, now).train
    run(book, "b", 0.009, passed=False)

    assert not book.decide("", cells, {}, now).train
    again = book.decide("", cells, {"chat": 0.1}, now)
    assert again.train and "acceptance fell in chat" in again.reason


def test_it_must_pay_with_a_margin() -> None:
    """Half as much traffic, and the same run does not pay any more."""
    cells = {"chat": cell(0.8)}
    book = ledger()
    busy(book, 0.01)
    run(book, "a", 0.1, passed=True, cpu_s=20.0)
    yes = book.decide("", cells, {}, 600.0)
    less = ledger()
    busy(less, 0.004)
    run(less, "a", 0.1, passed=True, cpu_s=20.0)
    no = less.decide("", cells, {}, 600.0)

    assert yes.train and yes.predicted_s > 1.5 * 20 and not no.train and no.predicted_s < 1.5 * 20


def test_no_traffic_no_training() -> None:
    """Nothing could be saved."""
    assert "no traffic" in ledger().decide("", {}, {"chat": 0.3}, 0.0).reason


def test_drift_in_a_rare_domain_counts_by_its_share() -> None:
    """A domain of one in a thousand steps does not pay for a run of everybody's draft."""
    book = ledger()
    now = busy(book, 0.02)
    run(book, "a", 0.0, passed=False)
    cells = {"chat": cell(0.8, 100_000), "law": cell(0.4, 100)}

    rare = book.decide("", cells, {"law": 0.2}, now)
    common = book.decide("", {"chat": cell(0.8, 100), "law": cell(0.4, 100_000)}, {"law": 0.2}, now)

    assert not rare.train and common.train


def test_costs_follow_what_runs_took() -> None:
    """The first one is guessed, later ones are known."""
    book = ledger()
    guess = book.cost_s("")
    run(book, "a", 0.05, passed=True, cpu_s=40.0)

    assert guess == pytest.approx(120.0) and book.cost_s("") == pytest.approx(40.0)


def test_realised_savings_are_counted_against_the_predecessor_by_domain() -> None:
    """Steps not taken, at what a step costs now; negative where the version is worse there."""
    book = ledger()
    figures = Figures()
    busy(book, 0.5)  # 0.01 s for each step of a stream
    old = ServedStream("r", "t", "law", "old", 200, 100)
    figures.add([old, ServedStream("r", "t", "chat", "old", 300, 100)], 1.0)
    book.begin("a", "", 0.0)
    book.update("a", version="new", spent_s=1.5)

    book.served([("new", "law", 400, 100)], figures, {"new": "old"})
    assert book.entries[0].realised_s == pytest.approx(1.0)  # 200 steps would have been: 100 fewer
    book.served([("new", "chat", 300, 150)], figures, {"new": "old"})
    assert book.entries[0].realised_s == pytest.approx(0.5)
    book.served([("old", "law", 300, 150)], figures, {"new": "old"})

    total = book.view(600.0)["total"]
    assert total["net_s"] == pytest.approx(-1.0) and total["num_runs"] == 1


def test_what_the_gate_refused_brought_nothing() -> None:
    """That is known, and what it cost is a loss; what was not scored yet may still bring something."""
    book = ledger()
    book.begin("refused", "", 0.0)
    book.update("refused", version="bad", spent_s=4.0, gate_saving=-0.2)
    book.begin("new", "", 1.0)

    new, refused = book.view(600.0)["runs"]
    assert (refused["realised_s"], refused["spent_s"], new["realised_s"]) == (0.0, 4.0, None)
