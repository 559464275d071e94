"""A port -> an empty Ray cluster of a head and other nodes on this machine, until SIGTERM: what `ray up` or KubeRay leave.

The head has room for the router, Control and the gateway, the others for the workers: each for all that there are. Ray's token is on, its
dashboard is on the port.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from paceline.deploy import local


def main(port: int, ready: Path, num_workers: int) -> None:
    """Writes Ray's token into the file `ready` when the head and `num_workers` nodes are up."""
    ended = threading.Event()
    folder = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))
    local.ray_environment(folder)
    import ray  # reads its environment once
    from ray.cluster_utils import Cluster

    cluster = Cluster(shutdown_at_exit=False)
    common = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
    try:
        head = {"paceline_control": 1, "paceline_gateway": 1}
        dashboard = {"dashboard_host": "127.0.0.1", "dashboard_port": port, "include_dashboard": True}
        cluster.add_node(num_cpus=4, resources=head, temp_dir=str(folder), **dashboard, **common)
        workers = {f"paceline_{role}": 3 for role in ("prefill", "decode", "draft")}
        for _ in range(num_workers):
            cluster.add_node(num_cpus=4, resources=workers, include_dashboard=False, **common)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        ready.write_text(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text())
        ended.wait()
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    finally:
        local._stop(folder, 60.0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
