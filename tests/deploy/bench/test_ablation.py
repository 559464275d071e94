"""Losses on the same requests -> one row each; the table in the documentation is made by the same code."""

from __future__ import annotations

import math

import pytest

from paceline.deploy.bench.learn.ablation import ARMS, ablation


@pytest.mark.slow
def test_each_arm_starts_from_the_same_draft_and_sees_the_same_requests() -> None:
    """Adapters too; what differs is what was learnt."""
    arms = [arm for arm in ARMS if arm.name in ("kl", "hybrid, lora 16")]
    rows, figures = ablation(num_requests=8, num_held_out=4, steps=3, arms=arms, batch_tokens=256)

    assert [row.arm for row in rows] == [arm.name for arm in arms]
    assert len({row.acceptance_before for row in rows}) == len({row.tokens for row in rows}) == 1
    assert all(math.isfinite(row.loss) and row.steps == 3 and row.tokens_per_step_before > 1 for row in rows)
    assert figures.keys() == {f"ablation.{arm.name}.acceptance_gain" for arm in arms}
