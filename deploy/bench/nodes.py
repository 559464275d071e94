"""A run folder -> empty Ray nodes on this machine, with a dashboard for `paceline deploy`, until SIGTERM.

What `paceline serve` starts has one node, which cannot be killed without another that lives on, and one configuration
for its whole life. Of two nodes the second is replaced whenever it died, as a cloud replaces a machine. Run as
`python -m paceline.deploy.bench.nodes FOLDER`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from paceline.cluster.config import ClusterConfig
from paceline.deploy import local

FIRST = "paceline_first"
"""A resource of the node that stays: the gateway and control are placed by it."""
SETTINGS = (
    "link.interface=node",
    f"gateway.resources={{{FIRST}: 0.01}}",
    f"control.resources={{{FIRST}: 0.01}}",
)
ONE_OF_EACH_ROLE = ("prefill.max_per_node=1", "decode.max_per_node=1", "draft.max_per_node=1")
"""A worker of each role on each of two nodes."""
_SPARE_CPUS = 2.5
"""For workers that begin before those which they replace have ended."""


def main(folder: Path) -> None:
    """Write the same state file as `paceline serve`, and into it the way to the dashboard."""
    state = local.read_state(folder)
    assert state is not None, f"{folder} has no state.json"
    stop = threading.Event()
    local._catch_signals(stop)
    ray_folder = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))
    local.ray_environment(ray_folder)
    import ray
    from ray.cluster_utils import Cluster

    config = ClusterConfig.model_validate(state["config"])
    cluster = Cluster(shutdown_at_exit=False)
    dashboard = {
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": state["dashboard_port"],
    }
    try:
        _add_node(cluster, config, resources={FIRST: 1}, temp_dir=str(ray_folder), **dashboard)
        second = _add_node(cluster, config) if state["nodes"] == 2 else None
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        local._catch_signals(stop)  # again: ray.init puts its own handlers in place
        token = os.environ["RAY_AUTH_TOKEN_PATH"]
        local.write_state(
            folder, {**state, "phase": "empty", "ray_folder": str(ray_folder), "ray_token": token}
        )
        while not stop.wait(0.1):
            if second is not None and not (second.all_processes and second.remaining_processes_alive()):
                began = time.monotonic()
                cluster.remove_node(second, allow_graceful=False)
                second = _add_node(cluster, config)
                print(
                    f"second node replaced in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True
                )
    except Exception as error:
        local.write_state(folder, {**state, "phase": "failed", "error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        local._stop(ray_folder, 40.0)


def _add_node(cluster: Any, config: ClusterConfig, **how: Any) -> Any:
    return cluster.add_node(
        **{
            "num_cpus": round(local.needed_cpus(config) + _SPARE_CPUS),
            "object_store_memory": 80 << 20,
            "node_ip_address": "127.0.0.1",
            "include_dashboard": False,
            **how,
        }
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
