"""ClusterConfig and the node a process runs on -> where replicas may run, and the address their sockets bind to."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import psutil

from paceline.cluster.config import ClusterConfig, EngineConfig, ScaledConfig, ScalingConfig, TargetConfig
from paceline.cluster.errors import ConfigError
from paceline.deploy.serve_config import autoscaling


def engine_placement(engine: EngineConfig, scaling: ScalingConfig) -> dict[str, Any]:
    """Options of `serve.deployment` that say how many replicas of a role there are, and where."""
    actor = {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus, "resources": dict(engine.resources)}
    options = placement(actor, engine.replicas, engine.max_per_node)
    if isinstance(engine, ScaledConfig) and engine.max_replicas:
        del options["num_replicas"]
        options["autoscaling_config"] = autoscaling(engine, scaling)
    if isinstance(engine, TargetConfig) and engine.tp > 1:
        # A bundle for each rank, all on one node; the leader has the first, and puts the others into theirs.
        options["placement_group_bundles"] = [bundle(engine)] * engine.tp
        options["placement_group_strategy"] = "STRICT_PACK"
    return options


def bundle(engine: EngineConfig) -> dict[str, float]:
    """What one rank takes of a node, as Ray names it."""
    wanted = {"CPU": engine.num_cpus, "GPU": engine.num_gpus, **engine.resources}
    return {name: amount for name, amount in wanted.items() if amount}


def placement(actor: dict[str, Any], num_replicas: int, max_per_node: int) -> dict[str, Any]:
    """The same for any deployment. `actor`: what one replica takes of a node; 0 per node: no limit."""
    options: dict[str, Any] = {"num_replicas": num_replicas, "ray_actor_options": actor}
    if max_per_node:
        options["max_replicas_per_node"] = max_per_node
    return options


def node_name() -> str:
    """This node, for people and for locality. The host's name alone would not tell two Ray nodes of one host apart."""
    import ray  # not above: `paceline drain` chooses how Ray authenticates before it is imported

    return f"{socket.gethostname()}/{ray.get_runtime_context().get_node_id()[:6]}"


def on_this_node(config: ClusterConfig) -> ClusterConfig:
    """The configuration with `link.interface` as an address of this node."""
    import ray

    address = link_address(config.link.interface, ray.util.get_node_ip_address(), local_addresses())
    return config.model_copy(update={"link": config.link.model_copy(update={"interface": address})})


def local_addresses() -> list[str]:
    """Every IP address of this host, in the system's order."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [a for addresses in psutil.net_if_addrs().values() for a in addresses if a.family in families]
    return [a.address.partition("%")[0] for a in found]


def link_address(interface: str, ray_address: str, local: list[str]) -> str:
    """`link.interface` -> an address: itself, Ray's for `node`, or the host's one in a network.

    Raises:
        ConfigError: the host has no address in that network.
    """
    if interface == "node":
        return ray_address
    if "/" not in interface:
        return interface
    network = ipaddress.ip_network(interface)
    inside = [address for address in local if ipaddress.ip_address(address) in network]
    if not inside:
        raise ConfigError(
            f"link.interface={interface}: this node has {', '.join(local)}, none in that network"
        )
    return inside[0]
