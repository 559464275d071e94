"""A run folder -> a whole cluster on this machine, until SIGTERM: Ray head, Serve application, clean end.

Run as `python -m paceline.deploy.local RUN_FOLDER`. All processes of a run carry its id in the environment variable
PACELINE_RUN: `stop` ends exactly those, and no other Ray on the machine.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from paceline.cluster.admin.key import FILE_NAME, VARIABLE, ensure_admin_key, hash_key
from paceline.cluster.config import ClusterConfig, EngineConfig, Secrets, TargetConfig
from paceline.cluster.errors import ConfigError

RUN_VARIABLE = "PACELINE_RUN"
SHUTDOWN_S = 20.0
"""For Serve to end its replicas and its controller, besides what their streams take; usually it takes two."""


def home() -> Path:
    """Where run folders lie: $PACELINE_HOME, or ~/.paceline."""
    return Path(os.environ.get("PACELINE_HOME") or Path.home() / ".paceline")


def admin_key_path() -> Path:
    """Where the admin key is, unless the environment has it."""
    return home() / FILE_NAME


def run_folder(name: str) -> Path:
    """State and log of the cluster with this name."""
    return home() / "run" / name


def read_state(folder: Path) -> dict[str, Any] | None:
    """What the supervisor last wrote; None if there is no such run."""
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError):
        return None
    return state


def certificate(state: dict[str, Any], section: str) -> str:
    """The certificate file of a listener of this run, gateway or control; none where it speaks plain HTTP."""
    found = state.get("config", {}).get(section, {}).get("tls") or {}
    return str(found.get("cert", "none"))


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Replace the state file in one go."""
    partial = folder / "state.json.partial"
    partial.write_text(json.dumps(state, indent=1))
    partial.replace(folder / "state.json")


def processes_of(run_id: str) -> list[psutil.Process]:
    """Every living process of a run, found by its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(RUN_VARIABLE) == run_id:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return [process for process in found if process.pid != os.getpid()]


def end_processes(processes: list[psutil.Process], patience_s: float) -> None:
    """SIGTERM, and SIGKILL for what is left."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=5.0)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        return


def resident_bytes(processes: list[psutil.Process]) -> int:
    """Memory of these processes, each shared page counted once (PSS)."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.Error, OSError):
            continue
    return total


def supervise(folder: Path) -> None:
    """Start the cluster described in the run folder, keep it until a signal, leave nothing behind."""
    state = read_state(folder)
    assert state is not None, f"{folder} has no state.json"
    stop = threading.Event()
    _catch_signals(stop)
    ray_folder = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))  # short: sockets live below it
    try:
        _start(folder, state, ray_folder)
        _catch_signals(stop)  # again: ray.init puts its own handlers in place
        while not stop.wait(1.0):
            continue
    except Exception as error:
        write_state(folder, {**state, "phase": "failed", "error": f"{type(error).__name__}: {error}"})
        _keep_logs(ray_folder, folder)
        raise
    finally:
        _stop(ray_folder, SHUTDOWN_S + float(state["config"]["gateway"]["drain_s"]))


def _catch_signals(stop: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def _start(folder: Path, state: dict[str, Any], ray_folder: Path) -> None:
    began = time.monotonic()
    ray_environment(ray_folder)
    admin = take_admin_key()
    import ray

    config = ClusterConfig.model_validate(state["config"])
    state["phase"] = "starting Ray"
    write_state(folder, state)
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, round(needed_cpus(config) + 0.5)),
        resources=needed_resources(config),
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=100 << 20,
        _temp_dir=str(ray_folder),
        _node_ip_address="127.0.0.1",
    )
    state.update(phase="starting workers", ray_seconds=time.monotonic() - began, ray_folder=str(ray_folder))
    write_state(folder, state)
    deploy(config, admin=admin)
    state.update(phase="running", start_seconds=time.monotonic() - began)
    write_state(folder, state)


def ray_environment(ray_folder: Path) -> None:
    """What this process and all that Ray starts from it must find: a token of its own, loopback, plain priorities."""
    _write_token(ray_folder / "token")
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(ray_folder / "token"),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        # Ray runs its workers at nice 15, behind everything else on the machine: not what serving wants.
        RAY_worker_niceness="0",
        # Ray replaces a loopback node address by the machine's own, unless it thinks that clusters of several
        # machines are not wanted. On a laptop they are not: nothing should listen to the outside.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    )
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        os.environ.pop(name, None)


def take_admin_key() -> bytes:
    """The hash of the admin key, which is made if there is none; what Ray starts does not find it in its environment."""
    digest = hash_key(ensure_admin_key(admin_key_path()))
    os.environ.pop(VARIABLE, None)
    return digest


def deploy(config: ClusterConfig, *, admin: bytes = b"") -> None:
    """The application on the Ray cluster this process is connected to; returns when Serve has placed all replicas.

    `admin`: hash of the admin key; by default it is looked for, and made, here.
    """
    from ray import serve

    from paceline.deploy.app import APP_NAME, build_app

    serve.start(http_options={"location": "NoServer"})
    given = Secrets.create().model_copy(update={"admin": admin or take_admin_key()})
    serve.run(build_app(config, given), name=APP_NAME, route_prefix=None)


def _stop(ray_folder: Path, limit_s: float) -> None:
    """End Serve, Ray and every process of the run. Serve may wait for ever for a controller that is gone."""
    import ray
    from ray import serve

    is_stuck = False
    if ray.is_initialized():
        is_stuck = not _within(serve.shutdown, limit_s)
        if not is_stuck:
            ray.shutdown()
    end_processes(processes_of(os.environ[RUN_VARIABLE]), 3.0)
    shutil.rmtree(ray_folder, ignore_errors=True)
    if is_stuck:  # nothing else is left, and Ray's own exit would wait as well
        print(
            f"Serve did not shut down within {limit_s:g} s: its processes were ended",
            file=sys.stderr,
            flush=True,
        )
        os._exit(0)


def _within(action: Callable[[], object], limit_s: float) -> bool:
    """Whether `action` came to its end in time; if not, it is left alone in a thread that keeps nothing alive."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def _keep_logs(ray_folder: Path, folder: Path) -> None:
    """Ray's folder goes with the run; after a failed start its workers' logs are what explains it."""
    target = folder / "failed-logs"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for source in [
        *ray_folder.glob("session_latest/logs/worker-*.err"),
        *ray_folder.glob("session_latest/logs/serve/*"),
    ]:
        if source.is_file() and source.stat().st_size:
            shutil.copyfile(source, target / f"{source.stem}.log")


def _write_token(path: Path) -> None:
    """Ray's token is full access to the cluster: readable by its owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def _engines(config: ClusterConfig) -> list[EngineConfig]:
    """Of all workers that are placed."""
    return [config.prefill, config.decode, config.draft, *([config.trainer] if config.has_trainer else [])]


def ranks(engine: EngineConfig) -> int:
    """Processes of one worker."""
    return engine.tp if isinstance(engine, TargetConfig) else 1


def needed_cpus(config: ClusterConfig) -> float:
    """Sum of the CPU shares that placement asks for, when there are as many workers as there may be."""
    engines = _engines(config)
    return sum(e.num_cpus * e.peak_replicas * ranks(e) for e in engines) + (
        config.gateway.num_cpus * config.gateway.replicas + config.router.num_cpus + config.control.num_cpus
    )


def needed_resources(config: ClusterConfig) -> dict[str, float]:
    """The custom resources that placement asks for: the only node of a local cluster offers all of them."""
    needed: Counter[str] = Counter()
    for engine in _engines(config):
        for name, amount in engine.resources.items():
            needed[name] += math.ceil(amount * engine.peak_replicas * ranks(engine))
    for section in (config.gateway, config.control, config.router):
        for name, amount in section.resources.items():
            needed[name] += math.ceil(amount)
    return {name: float(amount) for name, amount in needed.items() if not name.startswith("node:")}


def check_fits_one_node(config: ClusterConfig) -> None:
    """
    Raises:
        ConfigError: the configuration wants several nodes, and would wait for them for ever.
    """
    if config.gateway.replicas > 1:
        raise ConfigError(f"gateway.replicas={config.gateway.replicas}: expected 1 on one machine")
    for role, engine in (("prefill", config.prefill), ("decode", config.decode), ("draft", config.draft)):
        if 0 < engine.max_per_node < engine.peak_replicas:
            most = f"{role}.{'max_replicas' if engine.max_replicas else 'replicas'}={engine.peak_replicas}"
            raise ConfigError(
                f"{role}.max_per_node={engine.max_per_node}: expected 0 or at least {most} on one machine"
            )


if __name__ == "__main__":
    supervise(Path(sys.argv[1]))
