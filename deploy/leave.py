"""A node of a Ray cluster -> the same cluster without it: its replicas are replaced elsewhere, then drain, then are gone.

`paceline drain` does it: on a host that is to be serviced, and in a pod that is about to be stopped. Ray is told that the node leaves; Serve then starts a replacement for each replica that runs there,
and ends the replica once that is ready, or shortly before the time is up. Streams go on elsewhere with the same text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.cluster.errors import ConfigError, PacelineError, Unavailable
from paceline.deploy.ray_deploy import ray_token
from paceline.deploy.serve_config import APP_NAME

_REPLICA = f"SERVE_REPLICA::{APP_NAME}#"
_POLL_S = 0.5
JOINS = "joins"
"""File in PACELINE_HOME of a host of `ray up`: while it is there, Ray's autoscaler may start Ray there, and start it again."""
_REASON = "DRAIN_NODE_REASON_PREEMPTION"
"""Ray's word for a node that leaves at a given time, whatever it is doing then; the other reason is refused by busy ones."""


class RayNodes:
    """Ray's own tables, of the cluster that this host is part of."""

    def __init__(self) -> None:
        """
        Raises:
            Unavailable: no Ray runs here, or its head does not answer.
        """
        if ray_token() is not None:  # as on every node that `ray up` or KubeRay made; Ray reads it once
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        import ray
        from ray._private import services
        from ray._private.state import GlobalState

        try:
            address = services.canonicalize_bootstrap_address_or_die(None)
            self._gcs = ray._raylet.GcsClient(address=address)
            self._tables = GlobalState()
            self._tables._initialize_global_state(services._get_gcs_client_options(address))
            self.all()
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise Unavailable(f"no Ray cluster is reached from here: {str(error).splitlines()[0]}") from None
        self.here = frozenset(services.find_node_ids())
        """Ids of the nodes of this host: one, outside of tests."""

    def all(self) -> list[dict[str, Any]]:
        """Those that are alive, as Ray describes them."""
        return [node for node in self._tables.node_table() if node["Alive"]]

    def replicas(self, node_id: str) -> list[str]:
        """Roles of the replicas that run there."""
        actors: Mapping[str, Any] = self._tables.actor_table(None, actor_state_name="ALIVE")
        names = [a["Name"] for a in actors.values() if a["Address"]["NodeID"] == node_id]
        return sorted(name.split("#")[1] for name in names if name.startswith(_REPLICA))

    def drain(self, node_id: str, limit_s: float) -> None:
        """
        Raises:
            PacelineError: Ray refuses.
        """
        from ray.core.generated import autoscaler_pb2

        reason, until = autoscaler_pb2.DrainNodeReason.Value(_REASON), time.time() + limit_s
        accepted, why = self._gcs.drain_node(node_id, reason, "paceline drain", int(until * 1000))
        if not accepted:
            raise PacelineError(f"Ray does not drain the node: {why}")


def find(nodes: Iterable[Mapping[str, Any]], here: Iterable[str], wanted: str) -> str:
    """The id of a node: `wanted` as `paceline status` shows it, host/abc123, or empty for the one of this host.

    Raises:
        ConfigError: there is no such node, or it is the head, for which nothing can step in.
    """
    known = {f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}": node for node in nodes}
    if wanted:
        found = [name for name in known if name == wanted]
    else:
        found = [name for name, node in known.items() if node["NodeID"] in set(here)]
    if len(found) != 1:
        what = f"node {wanted!r}" if wanted else "this host"
        raise ConfigError(f"{what}: expected one of {', '.join(sorted(known)) or 'none, Ray has no nodes'}")
    node = known[found[0]]
    if "node:__internal_head__" in node["Resources"]:
        raise ConfigError(
            f"node {found[0]}: the head cannot leave; `ray down` or `paceline stop` ends the cluster"
        )
    return str(node["NodeID"])


def stay_away(home: Path) -> bool:
    """Keep Ray from being started on this host again: the autoscaler of `ray up` would, as soon as it missed the node.

    Returns whether there is one that looks.
    """
    mark = home / JOINS
    if not mark.exists():
        return False
    mark.unlink()
    return True


def leave(nodes: RayNodes, node_id: str, limit_s: float, say: Callable[[str], None]) -> list[str]:
    """Drain the node and wait. Returns the roles that still run there when the time is up; none is what one wants."""
    nodes.drain(node_id, limit_s)
    end, said = time.monotonic() + limit_s, ""
    while left := nodes.replicas(node_id):
        if not any(node["NodeID"] == node_id for node in nodes.all()):
            return []
        if time.monotonic() > end:
            break
        if (text := ", ".join(left)) != said:
            said = text
            say(f"still here: {text}")
        time.sleep(_POLL_S)
    return left
