"""A run folder with a configuration -> the application on two raylets of this machine, until SIGTERM.

What `paceline serve` starts has one node. Here each node has CPUs for all roles and a custom resource with its name.
SIGUSR1 kills the second node and all that runs there; SIGUSR2 adds another in its place.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from paceline.cluster.config import ClusterConfig
from paceline.deploy import local

CPUS = 4


def add_node(cluster: Any, name: str, **how: Any) -> Any:
    return cluster.add_node(
        num_cpus=CPUS,
        resources={name: 100},
        object_store_memory=80 << 20,
        node_ip_address="127.0.0.1",
        include_dashboard=False,
        **how,
    )


def main(folder: Path) -> None:
    """Write the same state file as `paceline serve`, so that `paceline status` reads it."""
    state = local.read_state(folder)
    assert state is not None
    config = ClusterConfig.model_validate(state["config"])
    wanted: list[int] = []
    news = threading.Event()
    ray_folder = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))

    def note(number: int, _: object) -> None:
        wanted.append(number)
        news.set()

    def listen() -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, note)

    listen()
    began = time.monotonic()
    local.ray_environment(ray_folder)
    import ray  # reads its environment once
    from ray.cluster_utils import Cluster

    cluster = Cluster(shutdown_at_exit=False)
    try:
        add_node(cluster, "first", temp_dir=str(ray_folder))
        second = add_node(cluster, "second")
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        local.deploy(config)
        listen()  # ray.init puts its own handlers in place
        seconds = time.monotonic() - began
        local.write_state(folder, {**state, "phase": "running", "start_seconds": seconds})
        while signal.SIGTERM not in wanted:
            news.wait()
            news.clear()
            while wanted and wanted[0] != signal.SIGTERM:
                if wanted.pop(0) == signal.SIGUSR1:
                    cluster.remove_node(second, allow_graceful=False)
                else:
                    second = add_node(cluster, "second")
    finally:
        local._stop(ray_folder, 40.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
