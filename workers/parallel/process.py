"""A socket to a leader's process -> one rank after another of its gangs; ends when the leader does.

python -m paceline.workers.parallel.process FD
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    setups: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for line in link.makefile("rb"):
            setups.put(line)
        os._exit(0)  # the leader is gone, or wants this rank gone

    threading.Thread(target=listen, name="listen", daemon=True).start()
    import msgspec

    from paceline.cluster.errors import PacelineError
    from paceline.workers.parallel.rank import RankSetup, serve_rank

    while True:
        setup = msgspec.json.decode(setups.get(), type=RankSetup)
        try:
            serve_rank(setup)
        except PacelineError as error:
            print(f"rank {setup.rank} of {setup.size} ended: {error}", file=sys.stderr, flush=True)
            os._exit(1)


if __name__ == "__main__":
    main()
