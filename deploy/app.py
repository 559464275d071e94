"""ClusterConfig -> the Ray Serve application: which deployments there are and what each is made of.

Serve places, heals and scales these replicas. It carries no tokens: each replica opens its own connections.
"""

from __future__ import annotations

import inspect
from typing import Any

from ray import serve
from ray.serve import Application

from paceline.cluster.config import ClusterConfig, ControlConfig, GatewayConfig, Secrets
from paceline.deploy import replicas
from paceline.deploy.placement import engine_placement, placement
from paceline.deploy.serve_config import APP_NAME

__all__ = ["APP_NAME", "build_app"]


def build_app(config: ClusterConfig, secrets: Secrets) -> Application:
    """The whole graph. Workers find each other through the router's directory; Serve only tells them where it is."""
    grace_s = config.gateway.drain_s
    at_router = {"num_cpus": config.router.num_cpus, "resources": dict(config.router.resources)}
    router = _deploy(replicas.RouterReplica, grace_s, **placement(at_router, 1, 0)).bind(config, secrets)
    control = _deploy(replicas.ControlReplica, grace_s, **_listener(config.control, 1)).bind(
        config, secrets, router
    )
    kinds = (
        (replicas.PrefillReplica, config.prefill),
        (replicas.DecodeReplica, config.decode),
        (replicas.DraftReplica, config.draft),
    )
    engines = [
        _deploy(kind, grace_s, threads=engine.threads, **engine_placement(engine, config.scaling)).bind(
            config, secrets, router
        )
        for kind, engine in kinds
        if engine.replicas > 0
    ]
    if config.has_trainer:
        trainer = config.trainer
        engines.append(
            _deploy(
                replicas.TrainerReplica,
                0.0,
                threads=trainer.threads,
                **engine_placement(trainer, config.scaling),
            ).bind(config, secrets, router)
        )
    placed = {**_listener(config.gateway, config.gateway.replicas), **_new_before_old(config.gateway)}
    # The root deployment must hold the others for Serve to deploy them; it uses the router's handle only.
    return _deploy(replicas.GatewayReplica, grace_s + replicas.notice_s(config.gateway), **placed).bind(
        config, secrets, router, [control, *engines]
    )


def _listener(section: GatewayConfig | ControlConfig, num_replicas: int) -> dict[str, Any]:
    """Where processes with a port of their own run: no two on one node."""
    actor = {"num_cpus": section.num_cpus, "resources": dict(section.resources)}
    return placement(actor, num_replicas, 1 if num_replicas > 1 else 0)


def _new_before_old(gateway: GatewayConfig) -> dict[str, Any]:
    """A single gateway is replaced by one that listens already, on the same port: nobody is refused meanwhile.

    Several are on nodes of their own, where there is no room for another: they are replaced one after the other.
    """
    if gateway.replicas > 1 or "max_surge_percent" not in inspect.signature(serve.deployment).parameters:
        return {}
    return {"max_surge_percent": 100}


def _deploy(
    replica: type, grace_s: float, *, ray_actor_options: dict[str, Any], threads: int = 1, **placed: Any
) -> Any:
    """A deployment named after its role. `grace_s`: how long its streams may go on once it is told to end."""
    return serve.deployment(
        name=replica.__name__.removesuffix("Replica").lower(),
        ray_actor_options={**ray_actor_options, "runtime_env": {"env_vars": _environment(threads)}},
        # A killed replica must be seen and replaced at once, a busy one must not be taken for dead.
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=grace_s + 8.0,
        graceful_shutdown_wait_loop_s=0.1,
        **placed,
    )(replica)


def _environment(threads: int) -> dict[str, str]:
    """What must be set before a worker's process starts.

    Threads that wait must sleep: spinning OpenMP threads ruin whoever shares the core. And freed memory must stay
    with the process: by default glibc returns large temporaries at once, and each step pays for their page faults
    again (gathering 2 MB of KV took 770 us instead of 130).
    """
    return {
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
