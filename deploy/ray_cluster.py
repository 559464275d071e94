"""ClusterConfig and hosts -> the file that `ray up` reads, for AWS or for machines of your own: one template for both."""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jinja2

from paceline.cluster.config import ClusterConfig, EngineConfig
from paceline.cluster.errors import ConfigError
from paceline.deploy.local import ranks

Provider = Literal["aws", "onprem"]
PREFIX = "paceline_"
"""Of the custom resources by which nodes offer room and workers ask for it; presets/cluster.yaml asks."""
HEAD = ("control", "gateway")
"""What the head has room for, besides Ray's own processes."""
_GROWTH = 4
_INSTANCES = {False: "c7i.4xlarge", True: "g6.4xlarge"}
"""By whether the role wants a GPU."""
_TEMPLATE = Path(__file__).with_name("cluster.yaml.j2")


@dataclass(frozen=True, kw_only=True)
class Files:
    """What `ray up` copies to the nodes, as paths on the machine where it runs."""

    config: str = "deploy/presets/cluster.yaml"
    wheel: str = ""
    token: str = "~/.ray/auth_token"
    ssh_key: str = "~/.ssh/id_ed25519"


@dataclass(frozen=True)
class Host:
    """A machine of one's own and the roles it has room for."""

    address: str
    roles: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Host:
        """decode+draft=10.0.0.12 -> a host.

        Raises:
            ConfigError: it does not look like that.
        """
        roles, equals, address = text.partition("=")
        return cls(_address(f"--host {text!r}", address if equals else ""), tuple(roles.split("+")))


def cluster_yaml(
    config: ClusterConfig,
    provider: Provider,
    *,
    files: Files,
    head: str = "10.0.0.10",
    hosts: Sequence[Host] = (),
    ssh_user: str = "ubuntu",
    name: str = "paceline",
    file_name: str = "cluster.yaml",
    command: str = "paceline cluster-yaml",
) -> str:
    """The whole file, with its comments.

    Raises:
        ConfigError: a role has no host, a host an unknown role, or the configuration does not ask for roles by resources.
    """
    engines = {role: engine for role, engine in _engines(config) if engine.replicas}
    for role, engine in engines.items():
        if PREFIX + role not in engine.resources:
            raise ConfigError(
                f"{role}.resources={engine.resources}: expected {PREFIX}{role}, as in the preset `cluster`"
            )
    wheel_name = f"paceline-{version('paceline')}-py3-none-any.whl"
    context: dict[str, Any] = {
        "title": "A cluster on AWS" if provider == "aws" else "A cluster on your own machines",
        "command": command,
        "file_name": file_name,
        "name": name,
        "provider": provider,
        "gateway_port": config.gateway.port,
        "head": _address("--head", head),
        "head_resources": {PREFIX + role: 1 for role in HEAD},
        "groups": [_group(role, engine) for role, engine in engines.items()],
        "hosts": _hosts(engines, hosts) if provider == "onprem" else [],
        "ssh_user": ssh_user,
        "ssh_key": files.ssh_key,
        "token_file": files.token,
        "config_file": files.config,
        "wheel": files.wheel or f"dist/{wheel_name}",
        "wheel_name": wheel_name,
        "venv": "$HOME/.paceline/venv",
        "environment": " ".join(_environment(provider)),
    }
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["tojson"] = json.dumps
    return environment.from_string(_TEMPLATE.read_text()).render(context)


def _environment(provider: Provider) -> Iterable[str]:
    """Of Ray's processes on every node: see `local.ray_environment`."""
    yield "RAY_AUTH_MODE=token"
    yield "RAY_USAGE_STATS_ENABLED=0"
    yield "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0"
    yield "RAY_worker_niceness=0"
    if provider == "onprem":
        yield "RAY_enable_autoscaler_v2=0"
        # Nobody stops Ray on the hosts after `ray down`: it ends when it misses the head. By then, sooner than after Ray's
        # own minute, the head has counted a host that it misses as dead anyway.
        yield "RAY_gcs_rpc_server_reconnect_timeout_s=20"


def _engines(config: ClusterConfig) -> Iterable[tuple[str, EngineConfig]]:
    yield from (("prefill", config.prefill), ("decode", config.decode), ("draft", config.draft))
    if config.has_trainer:
        yield "trainer", config.trainer


def _group(role: str, engine: EngineConfig) -> dict[str, Any]:
    per_node = engine.max_per_node or 1
    nodes = math.ceil(engine.replicas / per_node)
    bound = math.ceil(engine.peak_replicas / per_node)
    return {
        "role": role,
        "replicas": engine.replicas if bound == nodes else f"{engine.replicas} to {engine.peak_replicas}",
        "per_node": per_node,
        "max_nodes": bound if bound > nodes else _GROWTH * nodes if role != "trainer" else 1,
        "instance": _INSTANCES[engine.num_gpus > 0],
        "resources": {PREFIX + role: per_node * _room(role, engine)},
    }


def _room(role: str, engine: EngineConfig) -> float:
    """What one worker takes of the resource of its role: each of its ranks takes as much."""
    return ranks(engine) * engine.resources[PREFIX + role]


def _hosts(engines: dict[str, EngineConfig], hosts: Sequence[Host]) -> list[dict[str, Any]]:
    """Each host with what it offers: the replicas of a role are spread over the hosts that have room for it."""
    for host in hosts:
        unknown = [role for role in host.roles if role not in engines]
        if unknown:
            raise ConfigError(
                f"--host {'+'.join(host.roles)}={host.address}: {unknown[0]!r} has no workers; expected some of "
                f"{', '.join(engines)}"
            )
        if sum(other.address == host.address for other in hosts) > 1:
            raise ConfigError(
                f"--host {host.address}: given twice; one host takes several roles as decode+draft"
            )
    offers: dict[str, dict[str, float]] = {host.address: {} for host in hosts}
    for role, engine in engines.items():
        places = [host.address for host in hosts if role in host.roles]
        if not places:
            raise ConfigError(f"--host {role}=ADDRESS: expected, since {role}.replicas={engine.replicas}")
        each = math.ceil(engine.peak_replicas / len(places))
        if 0 < engine.max_per_node < each:
            raise ConfigError(
                f"{role}.max_per_node={engine.max_per_node}: {len(places)} hosts are too few for {engine.peak_replicas} "
                "replicas"
            )
        for address in places:
            offers[address][PREFIX + role] = each * _room(role, engine)
    return [{"address": address, "resources": resources} for address, resources in offers.items()]


def _address(option: str, text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ConfigError(f"{option}: expected an IP address, as in decode+draft=10.0.0.12") from None
