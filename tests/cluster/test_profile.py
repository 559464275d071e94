"""Spread, CostModel and Profile files: known numbers come back, and every bad file names its field."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cluster.errors import ConfigError
from paceline.cluster.profile import (
    CostModel,
    DraftPoint,
    LinkModel,
    LinkPoint,
    Machine,
    ModelCard,
    PrefillPoint,
    Profile,
    Spread,
    StepPoint,
    ThreadPoint,
)


def spread(seconds: float) -> Spread:
    """A measurement without noise."""
    return Spread(median=seconds, q1=seconds, q3=seconds, num=1)


def steps(weights: list[float], noise: float = 0.0) -> list[StepPoint]:
    """Points of a machine that follows the model exactly, or nearly so."""
    true = CostModel(
        **dict(zip(["step", "row", "stream", "key", "pair"], weights, strict=True)), residual=0, worst=0
    )
    rng = np.random.default_rng(0)
    return [
        StepPoint(
            streams=b,
            nodes=n,
            context=c,
            seconds=spread(float(true.seconds(b, n, c)) * rng.lognormal(0, noise)),
        )
        for b, n, c in product([1, 4, 16], [1, 2, 4, 8, 16, 32], [64, 256, 1024])
    ]


def example() -> Profile:
    """A small whole profile."""
    card = ModelCard(folder="a", version="0123456789ab", path="lean", kv_bytes_per_token=2560, threads=1)
    points = tuple(steps([1e-3, 3e-5, 7e-5, 1e-9, 1e-10]))
    link = tuple(LinkPoint(num_bytes=n, seconds=spread(1e-4 + n / 1e9)) for n in (4096, 1 << 20, 1 << 25))
    return Profile(
        created="2026-11-21T05:00:00+00:00",
        is_quick=False,
        machine=Machine(cpu="c", cores=2, memory_bytes=1 << 34, versions={"torch": "2"}),
        target=card,
        draft=card,
        steps=points,
        cost=CostModel.fit(points),
        prefill=(PrefillPoint(chunk=64, tokens=256, tokens_s=spread(2e4)),),
        drafts=(DraftPoint(streams=1, context=64, depth=4, width=2, step=spread(1e-3), whole=spread(4e-3)),),
        threads=tuple(
            ThreadPoint(threads=n, decode=spread(1e-3 * n), prefill=spread(1e-2 / n)) for n in (1, 2)
        ),
        link=link,
        link_cost=LinkModel.fit(link),
    )


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    """Of any order of measurements."""
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3.0, q1=2.0, q3=4.0, num=5)


@pytest.mark.parametrize(
    "weights",
    [
        [1e-3, 3e-5, 7e-5, 1e-9, 1e-10],
        [5e-4, 0.0, 1e-4, 0.0, 2e-9],
        [1e-3, 0.0, 0.0, 0.0, 0.0],
        [0.0, 1e-3, 0.0, 1e-8, 0.0],
    ],
)
def test_the_fit_finds_the_times_it_was_made_of(weights: list[float]) -> None:
    """Coefficients nine digits apart, and those that are zero."""
    fitted = CostModel.fit(steps(weights))

    found = [fitted.step, fitted.row, fitted.stream, fitted.key, fitted.pair]
    np.testing.assert_allclose(found, weights, rtol=1e-6, atol=1e-15)
    assert fitted.worst < 1e-6


def test_the_residual_says_how_far_the_model_is_off() -> None:
    """With 10 % of noise a fit of 54 points stays within a few percent of the truth, and says 7 %."""
    weights = [1e-3, 3e-5, 7e-5, 1e-9, 1e-10]
    fitted = CostModel.fit(steps(weights, noise=0.1))
    true = np.asarray([float(p.seconds.median) for p in steps(weights)])
    mine = np.asarray([float(fitted.seconds(p.streams, p.nodes, p.context)) for p in steps(weights)])

    assert 0.03 < fitted.residual < 0.12 < fitted.worst < 0.5
    assert np.abs(mine / true - 1).max() < 0.15


def test_fitted_times_never_fall_with_more_work() -> None:
    """Whatever the noise: no coefficient is negative, so a planner cannot win by adding rows."""
    fitted = CostModel.fit(steps([1e-3, 0.0, 0.0, 0.0, 0.0], noise=0.5))
    grid = fitted.seconds(
        np.arange(1, 9)[:, None, None], np.arange(1, 9)[:, None], np.asarray([16, 64, 1024])
    )

    assert grid.shape == (8, 8, 3)
    for axis in range(3):
        assert (np.diff(grid, axis=axis) >= 0).all()


def test_the_link_fit_finds_latency_and_bandwidth() -> None:
    """And stays legal where messages took as long whatever their size."""
    fitted = example().link_cost
    flat = LinkModel.fit([LinkPoint(num_bytes=n, seconds=spread(1e-3)) for n in (1000, 2000)])

    assert fitted.latency == pytest.approx(1e-4) and fitted.bandwidth == pytest.approx(1e9)
    assert flat.latency == pytest.approx(1e-3) and flat.bandwidth >= 2e6


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Every number, bit for bit; an older file is replaced."""
    path = tmp_path / "p.json"
    path.write_text("old")
    example().save(path)

    assert Profile.load(path) == example()
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_the_best_number_of_threads_may_differ_by_work() -> None:
    """Small steps want one thread, prompts may want more."""
    assert (example().best_threads("decode"), example().best_threads("prefill")) == (1, 2)


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    """The example's tree with one value replaced."""
    tree: Any = example().model_dump(mode="json")
    node = tree
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return dict(tree)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (changed("steps", 3, "nodes", value=0), "steps.3.nodes=0: expected greater than or equal to 1"),
        (
            changed("steps", 0, "seconds", "q1", value=-1.0),
            "steps.0.seconds.q1=-1.0: expected greater than 0",
        ),
        (changed("steps", 0, "seconds", "median", value=9.0), "steps.0.seconds.median=9.0: expected"),
        (changed("cost", "row", value="fast"), "cost.row='fast': expected a valid number"),
        (changed("steps", value=[]), "steps=[]: expected"),
        (changed("target", "version", value="x"), "target.version='x': expected"),
        (changed("speed", value=3), "speed: unknown field"),
        (changed("link_cost", value={}), "link_cost.latency: missing"),
        (changed("format", value=2), "format=2: expected 1"),
        ({}, "format=None: expected 1"),
        ([], "format='list': expected 1"),
    ],
)
def test_a_bad_file_names_field_value_and_range(tmp_path: Path, tree: Any, expected: str) -> None:
    """One line for each mistake, with the file in front."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as caught:
        Profile.load(path)

    assert str(caught.value).startswith(f"{path}: ") and expected in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "{", "\udcff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    """Missing, empty, no JSON, no text."""
    path = tmp_path / "p.json"
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="p.json"):
        Profile.load(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """As a sentence, not a traceback."""
    with pytest.raises(ConfigError, match="cannot be written"):
        example().save(tmp_path / "no" / "p.json")
