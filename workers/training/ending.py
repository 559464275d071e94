"""A process at idle priority that must go -> gone within seconds, its memory free, however busy all cores are.

A process takes itself apart, at its own priority: where cores never idle, one at SCHED_IDLE that was killed keeps its
memory for minutes.
"""

from __future__ import annotations

import ctypes
import os

_PROCESS_MRELEASE = 448
"""Number of Linux's system call (5.15 and later), the same on every architecture; Python has no name for it."""


def hurry(pid: int) -> None:
    """Let a process run like any other from now on, if this user may: raising a priority can be forbidden."""
    if not hasattr(os, "SCHED_IDLE"):
        return
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return  # gone
    for thread in threads:
        try:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, 0)
        except OSError:
            continue  # forbidden, or the thread ended


def release(pid: int) -> None:
    """Free the memory of a child that was killed, in this process's time; needs no rights. Elsewhere it frees it itself."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        ctypes.CDLL(None).syscall(_PROCESS_MRELEASE, handle, 0)
    except (OSError, AttributeError):
        return
    finally:
        os.close(handle)
