"""A port and a limit -> an end, when the last connection to that port has ended: what a pod does before it is stopped.

Run as `python -m paceline.deploy.linger PORT SECONDS NOTICE`. The gateway goes on serving those who are connected, and
those who still come until whoever sends them knows better, which takes NOTICE seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_ESTABLISHED = "01"
_POLL_S = 0.5
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Of this network namespace, which is the pod's. Who owns a connection is nobody's business here."""


def linger(port: int, limit_s: float, notice_s: float = 0.0) -> int:
    """Wait until nobody is connected, but for `notice_s` at least. Returns how many still are, at the limit."""
    began = time.monotonic()
    while True:
        connected, waited = connections(port), time.monotonic() - began
        if waited >= (limit_s if connected else notice_s):
            break
        time.sleep(_POLL_S)
    return connected


def connections(port: int) -> int:
    """Established ones with this port on our side."""
    wanted = f":{port:04X}"
    rows = [
        line.split() for table in _TABLES if table.exists() for line in table.read_text().splitlines()[1:]
    ]
    return sum(row[1].endswith(wanted) and row[3] == _ESTABLISHED for row in rows)


if __name__ == "__main__":
    left = linger(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    print(f"connections left: {left}", flush=True)
