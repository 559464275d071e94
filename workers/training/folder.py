"""A run's id -> the folder that holds its state and result until control forgets the run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.cluster.learning.storage import home


def trainer_home() -> Path:
    """Where this user's trainers keep what is not published."""
    return home() / "trainer"


class RunFolder:
    """Files of one run. Written by its process alone, which holds the lock; removed by the trainer."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.root = root
        # A run id is control's, not a file name.
        self.path = root / hashlib.sha256(run_id.encode()).hexdigest()[:16]
        self.state = self.path / "state.safetensors"
        self.result = self.path / "result.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run alone: a process whose parent was killed may still be on its way out. Waits for it."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def write(self, path: Path, data: bytes) -> None:
        """A file that is there whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    def remove(self) -> None:
        """Forget the run."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_others(self) -> None:
        """Forget all runs but this: control asks for one at a time, and what is published is not here."""
        for other in self.root.iterdir() if self.root.is_dir() else ():
            if other != self.path:
                shutil.rmtree(other, ignore_errors=True)
