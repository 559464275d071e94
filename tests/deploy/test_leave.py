"""Ray's tables of nodes and actors -> the node that is meant, drained and waited for. With Ray: end_to_end/test_graceful.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.errors import ConfigError
from paceline.deploy import leave as leave_module
from paceline.deploy.leave import JOINS, find, leave, stay_away


def node(number: int, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": f"{number}" * 56,
        "NodeManagerHostname": f"host{number}",
        "Resources": resources,
        "Alive": True,
    }


HEAD, ONE, TWO = node(0, **{"node:__internal_head__": 1.0}), node(1), node(2)


class Tables:
    """RayNodes whose replicas leave one at each look."""

    def __init__(self, replicas: list[str], stays: int = 0) -> None:
        self.left, self.stays = list(replicas), stays
        self.drained: list[tuple[str, float]] = []

    def all(self) -> list[dict[str, Any]]:
        return [HEAD, ONE, TWO]

    def replicas(self, node_id: str) -> list[str]:
        found = list(self.left)
        if len(self.left) > self.stays:
            self.left.pop()
        return found

    def drain(self, node_id: str, limit_s: float) -> None:
        self.drained.append((node_id, limit_s))


def test_a_node_is_the_one_of_this_host_or_the_one_that_is_named() -> None:
    nodes = [HEAD, ONE, TWO]

    assert find(nodes, [TWO["NodeID"]], "") == TWO["NodeID"]
    assert find(nodes, [TWO["NodeID"]], "host1/111111") == ONE["NodeID"]


@pytest.mark.parametrize(
    "here, wanted, words",
    [
        ([], "", "this host: expected one of host0/000000, host1/111111"),
        ([], "host3", "node 'host3': expected one of"),
        ([HEAD["NodeID"]], "", "node host0/000000: the head cannot leave"),
        ([ONE["NodeID"], TWO["NodeID"]], "", "this host: expected one of"),
    ],
)
def test_any_other_is_refused(here: list[str], wanted: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find([HEAD, ONE, TWO], here, wanted)

    assert words in str(refused.value)


def test_a_host_of_ray_up_is_not_started_again(tmp_path: Path) -> None:
    """Only where `ray up` left its mark is there anything to keep away; the mark is the one that its commands ask for."""
    assert not stay_away(tmp_path)
    (tmp_path / JOINS).touch()

    assert stay_away(tmp_path) and not (tmp_path / JOINS).exists()
    template = (Path(leave_module.__file__).parent / "cluster.yaml.j2").read_text()
    assert f"touch ~/.paceline/{JOINS}\n" in template and f"test -e ~/.paceline/{JOINS} " in template


def test_it_waits_until_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.deploy.leave._POLL_S", 0.001)
    tables, said = Tables(["decode", "draft"]), list[str]()

    left = leave(tables, ONE["NodeID"], 5.0, said.append)  # type: ignore[arg-type]

    assert left == [] and tables.drained == [(ONE["NodeID"], 5.0)]
    assert said[0] == "still here: decode, draft"


def test_it_says_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.deploy.leave._POLL_S", 0.001)
    node_id = ONE["NodeID"]

    assert leave(Tables(["decode"], stays=1), node_id, 0.02, print) == ["decode"]  # type: ignore[arg-type]
    assert leave(Tables(["decode"], stays=1), "9" * 56, 9.0, print) == []  # type: ignore[arg-type]  # with its node
