"""ClusterConfig -> the configuration file of Ray Serve; and inside a cluster, that file's arguments -> the application.

`serve deploy`, KubeRay's `serveConfigV2` and `paceline deploy` all bring this file to a cluster. How many replicas a
role has is said where Serve changes it without a restart; everything else is an argument of `build`, and a change of it
rolls through the deployments one replica at a time.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.cluster.config import ClusterConfig, ScaledConfig, ScalingConfig, Secrets, check_config
from paceline.cluster.errors import ConfigError

if TYPE_CHECKING:  # it takes seconds, and only the cluster needs it
    from ray.serve import Application

APP_NAME = "paceline"
IMPORT_PATH = "paceline.deploy.serve_config:build"
SCALED_ROLES = ("prefill", "decode", "draft")
"""Roles whose number of replicas changes without restarting anything."""
POLICY = "paceline.cluster.scaling:by_load"
_LOOK_BACK_S = 20.0
"""Loads are averaged over this long: replicas tell Serve theirs every ten seconds."""
_NAMESPACE, _LINK_KEY = b"paceline", b"link-secret"


def serve_config(config: ClusterConfig, *, admin: bytes = b"") -> dict[str, Any]:
    """What `serve deploy` reads.

    Args:
        admin: SHA-256 of the operator's key. Without it Control takes the key of the node on which it runs.
    """
    tree = config.model_dump(mode="json", exclude_defaults=True)
    scaled = []
    for role in SCALED_ROLES:
        engine: ScaledConfig = getattr(config, role)
        if engine.replicas > 0:  # 0 means that there is no such deployment, and stays in the tree
            for field in ("replicas", "max_replicas"):
                tree.get(role, {}).pop(field, None)
            scaled.append({"name": role, **_how_many(engine, config.scaling)})
    tree.pop("scaling", None)
    arguments: dict[str, Any] = {"config": {name: fields for name, fields in tree.items() if fields}}
    if admin:
        arguments["admin"] = admin.hex()
    return {
        "proxy_location": "Disabled",  # gateways listen by themselves
        "applications": [
            {
                "name": APP_NAME,
                "import_path": IMPORT_PATH,
                "route_prefix": None,
                "args": arguments,
                "deployments": scaled,
            }
        ],
    }


def _how_many(engine: ScaledConfig, scaling: ScalingConfig) -> dict[str, Any]:
    if engine.max_replicas:
        return {"autoscaling_config": autoscaling(engine, scaling)}
    return {"num_replicas": engine.replicas}


def autoscaling(engine: ScaledConfig, scaling: ScalingConfig) -> dict[str, Any]:
    """Serve's `autoscaling_config` of a role that has `max_replicas`.

    Serve counts the requests that it carries, and it carries none of ours: each replica tells it its load instead
    (`record_autoscaling_stats`), which `paceline.cluster.scaling` turns into a number of replicas. To Serve a policy is
    code: when the first role gets one, or the last loses it, all replicas are replaced one by one; other bounds replace none.
    """
    return {
        "min_replicas": engine.replicas,
        "max_replicas": engine.max_replicas,
        "target_ongoing_requests": scaling.busy,
        "upscale_delay_s": scaling.up_after_s,
        "downscale_delay_s": scaling.down_after_s,
        "look_back_period_s": _LOOK_BACK_S,
        "policy": {"policy_function": POLICY},
    }


def build(args: dict[str, Any]) -> Application:
    """What Serve calls on the cluster. `args`: `config`, a tree that may name a preset, and perhaps `admin`, in hex.

    Raises:
        ConfigError: of the configuration, or it does not suit this cluster.
    """
    from paceline.deploy.app import build_app

    config, admin = read_args(args)
    check_links(config, num_nodes())
    return build_app(config, Secrets(link=link_secret(), admin=admin))


def read_args(args: Mapping[str, Any]) -> tuple[ClusterConfig, bytes]:
    """
    Raises:
        ConfigError: of the configuration, or an argument is unknown.
    """
    for name in args:
        if name not in ("config", "admin"):
            raise ConfigError(f"args.{name}: expected `config` and perhaps `admin`")
    tree = args.get("config", {})
    if not isinstance(tree, dict):
        raise ConfigError(f"args.config={tree!r}: expected sections such as `decode:`")
    try:
        admin = bytes.fromhex(args.get("admin", ""))
    except (TypeError, ValueError):
        admin = b"?"
    if len(admin) not in (0, 32):
        raise ConfigError("args.admin: expected the SHA-256 of the admin key, 64 hex digits")
    return check_config(tree), admin


def check_links(config: ClusterConfig, num_nodes: int) -> None:
    """
    Raises:
        ConfigError: workers on different nodes could not reach each other.
    """
    interface = config.link.interface
    if num_nodes > 1 and interface != "node" and "/" not in interface:
        kind = "a loopback" if ipaddress.ip_address(interface).is_loopback else "one node's"
        raise ConfigError(
            f"link.interface={interface}: {kind} address, but Ray has {num_nodes} nodes; expected `node` or a network "
            "such as 10.1.0.0/16"
        )


def num_nodes() -> int:
    """Of the cluster this process is in, alive now."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


def link_secret() -> bytes:
    """One for the life of a cluster, so that workers of two deployments trust each other while one replaces the other.

    From PACELINE_LINK_SECRET, else kept in Ray's own store, where Serve keeps the arguments of its replicas as well.
    """
    if os.environ.get("PACELINE_LINK_SECRET"):
        return Secrets.create().link
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(
        _LINK_KEY, secrets.token_bytes(32), overwrite=False, namespace=_NAMESPACE
    )  # one of several writers wins
    return bytes(internal_kv._internal_kv_get(_LINK_KEY, namespace=_NAMESPACE))
