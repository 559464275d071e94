"""A socket to the trainer -> one run, at idle priority; ends when the run ends, or when the trainer does.

python -m paceline.workers.training.process FD
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from paceline.workers.training.protocol import Progress, Set, Start, decode_command, encode


def yield_to_everybody() -> None:
    """Run only where a core has nothing else to do. Threads that are made later inherit it."""
    os.nice(19)  # where SCHED_IDLE is not known, or not allowed
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    lines = link.makefile("rb")
    start = decode_command(lines.readline())
    assert isinstance(start, Start)
    if start.is_idle:
        yield_to_everybody()
    # Only now: importing torch takes a second, and reads the number of threads from the environment.
    from pathlib import Path

    import torch

    from paceline.cluster.config import ClusterConfig
    from paceline.workers.training.folder import RunFolder
    from paceline.workers.training.pace import Neighbours, Pace
    from paceline.workers.training.run import Run

    config = ClusterConfig.model_validate_json(start.config)
    torch.set_num_threads(config.trainer.threads)
    writing = threading.Lock()

    def tell(progress: Progress) -> None:
        with writing:
            link.sendall(encode(progress))

    shares = start.is_idle and config.trainer.spare_share < 1
    duty = Neighbours(config.trainer.spare_share, config.trainer.threads).duty if shares else None
    pace = Pace(start.level, on_level=lambda level: run.on_level(level), duty=duty)
    run = Run(config, start.order, RunFolder(Path(start.folder), start.order.run_id), pace, tell)

    def listen() -> None:
        for line in lines:
            command = decode_command(line)
            if isinstance(command, Set):
                pace.set(command.level)
        os._exit(0)  # the trainer is gone: nobody would hear what comes of this

    threading.Thread(target=listen, name="listen", daemon=True).start()
    run.go()
    link.shutdown(socket.SHUT_WR)
    os._exit(0)  # taking torch apart takes longer than the kernel needs for all of it


if __name__ == "__main__":
    main()
