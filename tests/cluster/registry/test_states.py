"""Any sequence of what the loop and operators can do -> states of versions that a plain model says there should be."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from paceline.cluster.errors import RegistryError
from paceline.cluster.registry.records import MOVES, Version
from paceline.cluster.registry.registry import Registry

TAGS = ("", "domain:code")
STATES = tuple(MOVES)


class Versions(RuleBasedStateMachine):
    """The model is a dictionary: version -> [tag, state, pinned]; each call does what the rules say, or nothing."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now = 0.0
        self.registry = Registry.open("auto", Path(self.folder.name), clock=self.tick)
        self.model: dict[str, list[object]] = {}
        self.retired: list[str] = []

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def teardown(self) -> None:
        self.registry.close()
        self.folder.cleanup()

    def holder(self, tag: object, state: str) -> str | None:
        return next((name for name, (of, now, _) in self.model.items() if (of, now) == (tag, state)), None)

    def can_move(self, name: str, state: str) -> bool:
        tag, now, _ = self.model[name]
        if now == state:
            return True
        other = self.holder(tag, state) if state in ("live", "canary") else None
        return state in MOVES[now] and other is None  # type: ignore[index]

    def set_state(self, name: str, state: str) -> None:
        if self.model[name][1] != state:
            self.model[name][1:] = [state, False]
            self.retired = [other for other in self.retired if other != name]
            if state == "retired":
                self.retired.append(name)

    @initialize(target=names)
    def ship(self) -> str:
        self.registry.add_version(Version("v0", target="t", state="live"))
        self.model["v0"] = ["", "live", False]
        return "v0"

    @rule(target=names, tag=st.sampled_from(TAGS))
    def train(self, tag: str) -> str:
        name = f"v{len(self.model)}"
        self.registry.add_version(Version(name, tag=tag, target="t"))
        self.model[name] = [tag, "candidate", False]
        return name

    @rule(name=names, state=st.sampled_from(STATES))
    def move(self, name: str, state: str) -> None:
        legal = self.can_move(name, state)
        assert self.succeeds(lambda: self.registry.move(name, state, reason="r")) == legal  # type: ignore[arg-type]
        if legal:
            self.set_state(name, state)

    @rule(name=names, force=st.booleans())
    def promote(self, name: str, force: bool) -> None:
        tag, state, _ = self.model[name]
        old = self.holder(tag, "live")
        free = old is None or old == name or force or not self.model[old][2]
        legal = free and (state == "live" or "live" in MOVES[state])  # type: ignore[index]
        assert self.succeeds(lambda: self.registry.promote(name, reason="r", force=force)) == legal
        if legal:
            if old is not None and old != name:
                self.set_state(old, "retired")
            self.set_state(name, "live")

    @rule(tag=st.sampled_from(TAGS))
    def roll_back(self, tag: str) -> None:
        bad = self.holder(tag, "live")
        good = next((name for name in reversed(self.retired) if self.model[name][0] == tag), None)
        legal = bad is not None and good is not None
        assert self.succeeds(lambda: self.registry.roll_back(tag, reason="r")) == legal
        if bad is not None and good is not None:
            self.set_state(bad, "rolled_back")
            self.set_state(good, "live")

    @rule(name=names, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        call = self.registry.pin if pinned else self.registry.unpin
        legal = self.model[name][2] == pinned or self.model[name][1] == "live"
        assert self.succeeds(lambda: call(name, reason="r", actor="ops")) == legal
        if legal:
            self.model[name][2] = pinned

    def succeeds(self, call: object) -> bool:
        try:
            call()  # type: ignore[operator]
        except RegistryError:
            return False
        return True

    @invariant()
    def the_registry_says_the_same(self) -> None:
        found = {item.version: [item.tag, item.state, item.pinned] for item in self.registry.versions().items}
        assert found == self.model
        self.registry.check_integrity()
        for tag in TAGS:
            for state, held in (("live", self.registry.live(tag)), ("canary", self.registry.canary(tag))):
                assert (held.version if held else None) == self.holder(tag, state)


pytestmark = pytest.mark.slow
TestVersions = Versions.TestCase
TestVersions.settings = settings(
    max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
