"""PACELINE_ADMIN_KEY, or a file that only its owner reads -> the operator's key; a process keeps its hash only.

The key is compared as `paceline.cluster.keys` does it: 256 random bits need no slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from paceline.cluster.errors import ConfigError

VARIABLE = "PACELINE_ADMIN_KEY"
FILE_NAME = "admin.key"
"""In PACELINE_HOME."""
_SHAPE = re.compile(r"[\x21-\x7e]{24,512}")
_ID_DIGITS = 8


class AdminKey:
    """What is known of a key where it is checked: enough to recognise it, too little to use it."""

    def __init__(self, digest: bytes) -> None:
        """`digest`: SHA-256 of the key's text; empty if there is no key, and then nothing is recognised."""
        self._digest = digest

    @property
    def exists(self) -> bool:
        """Whether there is a key at all."""
        return bool(self._digest)

    @property
    def id(self) -> str:
        """A name for logs and the audit trail, from which nobody gets the key."""
        return hashlib.sha256(b"id:" + self._digest).hexdigest()[:_ID_DIGITS]

    def matches(self, text: str) -> bool:
        """Whether `text` is the key, in the same time wherever it differs."""
        digest = hash_key(text)
        return hmac.compare_digest(digest, self._digest or bytes(len(digest))) and self.exists


def hash_key(text: str) -> bytes:
    """What may be kept of a key."""
    return hashlib.sha256(text.encode(errors="replace")).digest()


def read_admin_key(path: Path) -> str | None:
    """The key of the environment, else of the file; None if there is neither.

    Raises:
        ConfigError: it cannot be read, is no key, or others can read the file.
    """
    given = os.environ.get(VARIABLE, "")
    if given:
        return _checked(given, VARIABLE)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"admin key file {path}: cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(
            f"admin key file {path}: its mode is {mode:o}, expected 600; others may have read it: delete it, and the next "
            "`paceline serve` makes another"
        )
    return _checked(text, f"admin key file {path}")


def ensure_admin_key(path: Path) -> str:
    """The key of the environment or the file; where there is neither, a new one in the file.

    Raises:
        ConfigError: as for `read_admin_key`, or the file cannot be written.
    """
    found = read_admin_key(path)
    if found is not None:
        return found
    text = f"pla_{secrets.token_urlsafe(32)}"
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)  # fails where somebody was faster: then theirs counts
    except FileExistsError:
        return ensure_admin_key(path)
    except OSError as error:
        raise ConfigError(f"admin key file {path}: cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return text


def _checked(text: str, where: str) -> str:
    if not _SHAPE.fullmatch(text):
        raise ConfigError(f"{where}: expected 24 to 512 printable ASCII characters without spaces")
    return text
