"""key file -> its content, told to whoever wants to know within half a second of each change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from paceline.cluster.errors import ConfigError
from paceline.cluster.keys import KeyContent, KeyFile

log = structlog.get_logger(__name__)

LOOK_S = 0.5
Listener = Callable[[KeyContent], None]


class KeyWatch:
    """One file, and what it held when it was last looked at."""

    def __init__(self, file: KeyFile) -> None:
        self.file = file
        self.content = KeyContent([])
        self.trouble = ""
        """Why the file cannot be read; `content` is then what it held before."""
        self.changes = 0
        """Grows with each change that was seen."""
        self._stamp: tuple[int, int, int] | None = None
        self.is_read = False
        """Whether the file was ever read, or seen not to be there."""
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """Tell it what the file holds after each change; at once if the file was read already."""
        self._listeners.append(listener)
        if self.is_read:
            listener(self.content)

    def look(self) -> None:
        """See whether the file has changed, and tell the others."""
        stamp = self.file.stamp()
        if self.is_read and stamp == self._stamp and not self.trouble:
            return
        try:
            content = self.file.content()
        except ConfigError as error:
            if not self.trouble:
                log.error("key_file_unreadable", error=str(error))
                self.changes += 1
            self.trouble = str(error)
            return
        self._stamp, self.trouble, self.content, self.is_read = stamp, "", content, True
        self.changes += 1
        for listener in self._listeners:
            listener(content)

    async def run(self) -> None:
        """Look until it is cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # whatever a listener raises: revocations must go on being seen
                log.exception("key_watch_failed")
            await asyncio.sleep(LOOK_S)
