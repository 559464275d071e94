"""What replicas say of their load -> how many there should be; Ray Serve's own wrapper bounds and delays it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray import cloudpickle

from paceline.cluster import scaling
from paceline.cluster.config import load_config
from paceline.cluster.scaling import LOAD, by_load
from paceline.deploy.serve_config import POLICY, autoscaling

BUSY = 0.5


@dataclass
class Config:
    target_ongoing_requests: float = BUSY


@dataclass
class Context:
    """As much of Serve's AutoscalingContext as the policy reads."""

    loads: dict[str, float]
    running_replicas: list[str] = field(default_factory=list)
    target_num_replicas: int = 1
    config: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        self.running_replicas = self.running_replicas or list(self.loads)

    @property
    def aggregated_metrics(self) -> dict[str, dict[str, float]]:
        return {LOAD: self.loads} if self.loads else {}


@pytest.mark.parametrize(
    "loads, wanted",
    [
        ({"a": 0.0}, 0.0),  # Serve keeps the fewest
        ({"a": 0.5}, 1.0),
        ({"a": 2.0}, 4.0),  # as many wait as run
        ({"a": 0.5, "b": 0.5, "c": 0.5}, 3.0),
        ({"a": 0.1, "b": 0.1, "c": 0.3}, 1.0),
    ],
)
def test_all_the_load_in_equal_parts(loads: dict[str, float], wanted: float) -> None:
    assert by_load(Context(loads))[0] == pytest.approx(wanted)


def test_a_silent_replica_is_no_reason_to_have_fewer() -> None:
    """One that just started, and all of them after the controller did; the load of those that speak still counts."""
    silent = {"running_replicas": ["a", "b", "c"], "target_num_replicas": 3}

    assert by_load(Context({"a": 0.1}, **silent))[0] == 3  # type: ignore[arg-type]
    assert by_load(Context({}, **silent))[0] == 3  # type: ignore[arg-type]
    assert by_load(Context({"a": 1.5, "b": 1.5}, **silent))[0] == 6  # type: ignore[arg-type]


def test_it_does_without_our_packages() -> None:
    """Serve pickles the module by value and calls it in its own process."""
    cloudpickle.register_pickle_by_value(scaling)
    try:
        pickled = cloudpickle.dumps(by_load)
    finally:
        cloudpickle.unregister_pickle_by_value(scaling)
    again: Callable[[Any], Any] = cloudpickle.loads(pickled)

    assert again(Context({"a": 1.0}))[0] == 2.0
    assert again is not by_load


def test_serve_takes_what_we_tell_it() -> None:
    """Its own model of the options, which finds our policy by its name and keeps to the bounds."""
    from ray.serve.config import AutoscalingConfig

    config = load_config(None, ["decode.replicas=2", "decode.max_replicas=5", "scaling.busy=0.4"])
    taken = AutoscalingConfig(**autoscaling(config.decode, config.scaling))

    assert (taken.min_replicas, taken.max_replicas) == (2, 5)
    assert taken.get_target_ongoing_requests() == 0.4
    assert (taken.upscale_delay_s, taken.downscale_delay_s) == (10.0, 300.0)
    assert taken.policy.policy_function == POLICY
    assert taken.policy.get_policy()(Context({"a": 1.0}, config=Config(0.25)))[0] == 4.0
