"""this machine's key file and what Control says of its own -> the valid key of a request, if it is one.

In a cluster only Control's key file is written to; it tells every gateway what is in it. A gateway may have a file as
well: the same one on one machine, or a copy that was mounted. A key that one of the two says is revoked is revoked.
Without Control a gateway goes on with what it heard last.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import structlog

from paceline.cluster.errors import Unavailable
from paceline.cluster.keys import Key, KeyFile, key_id

log = structlog.get_logger(__name__)


class KnownKeys:
    """A KeyStore of two sources."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file
        self._told: dict[str, Key] | None = None

    def tell(self, keys: bytes) -> None:
        """What Control has, as `types.KeySet` carries it; what cannot be read changes nothing."""
        try:
            told = msgspec.json.decode(keys, type=list[Key])
        except (msgspec.MsgspecError, UnicodeError) as error:
            log.error("keys_not_understood", error=str(error))
            return
        self._told = {key.id: key for key in told}

    def find(self, text: str) -> Key | None:
        """See `KeyStore.find`."""
        mine = self._file.find(text)
        if self._told is None:
            if mine is None and self._file.stamp() is None:
                raise Unavailable("API keys are not known yet")
            return mine
        id = key_id(text)
        told = self._told.get(id)
        if told is None:
            return mine
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        if told.revoked is not None or not hmac.compare_digest(digest, told.sha256):
            return None
        return None if self._file.is_revoked(id) else told
