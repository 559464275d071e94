"""A rank's setup -> an actor in the bundle that its leader's placement group has for it, on the leader's node.

The actor belongs to the replica that leads: Ray ends it with the replica, and it ends by itself when its group breaks.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec
import ray
import structlog
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.cluster.config import EngineConfig
from paceline.cluster.errors import PacelineError
from paceline.deploy.logs import configure_logs
from paceline.workers.parallel.rank import RankSetup, serve_rank

log = structlog.get_logger(__name__)


class RankActor:
    """One rank, in a thread of its own: the actor's calls only start it and ask whether it is there."""

    def begin(self, role: str, setup: bytes) -> None:
        """Load and follow the leader, until it ends the gang."""
        configure_logs(role)
        thread = threading.Thread(target=_follow, args=(setup,), name="rank", daemon=True)
        thread.start()

    def ping(self) -> int:
        """This process."""
        return os.getpid()


def _follow(data: bytes) -> None:
    setup = msgspec.json.decode(data, type=RankSetup)
    try:
        serve_rank(setup)
    except PacelineError as error:
        log.error("rank_ended", rank=setup.rank, size=setup.size, reason=str(error))
        os._exit(1)
    os._exit(0)


class ActorRank:
    """A rank in an actor, as its leader sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._ping = actor.ping.remote()
        self._is_dead = False

    def is_alive(self) -> bool:
        """False once Ray says that the actor is gone. Does not wait: the last answer counts until the next is here."""
        ready, _ = ray.wait([self._ping], timeout=0)
        if ready and not self._is_dead:
            try:
                ray.get(self._ping)
                self._ping = self._actor.ping.remote()
            except ray.exceptions.RayError:
                self._is_dead = True
        return not self._is_dead

    def end(self, limit_s: float) -> None:
        """It has been told already, if it could be."""
        ray.kill(self._actor, no_restart=True)


class RankLauncher:
    """Starts ranks beside the replica that this process is."""

    def __init__(self, role: str, engine: EngineConfig) -> None:
        """Made where the replica is: Ray does not know its placement group in threads of its own."""
        self._role, self._engine = role, engine
        self._group = get_current_placement_group()

    def __call__(self, setup: RankSetup) -> ActorRank:
        engine = self._engine
        if engine.num_gpus:  # Ray shows each actor its own GPUs only
            setup = msgspec.structs.replace(setup, device="cuda:0")
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=setup.rank)
        actor = (
            ray.remote(RankActor)
            .options(
                num_cpus=engine.num_cpus,
                num_gpus=engine.num_gpus,
                resources=dict(engine.resources),
                scheduling_strategy=strategy,
                max_restarts=0,
            )
            .remote()
        )
        actor.begin.remote(f"{self._role}-rank{setup.rank}", msgspec.json.encode(setup))
        return ActorRank(actor)
