"""A failure -> one exception that names what went wrong, where, and what to do.

    PacelineError
    |- ConfigError            a configuration value is outside its legal range
    |- RequestError           a client sent something we cannot serve (an HTTP 4xx)
    |- ModelError             weights, tokenizer or model family cannot be used
    |- WireError              a framed connection broke or its peer failed to prove itself
    |- TransferError          KV did not arrive whole, from the right request and incarnation
    |  `- LinkPoisoned        the process group of a link timed out and must be rebuilt
    |- GangLost               a rank of a tensor-parallel worker died or hangs: the whole worker is replaced
    |- RegistryError          the registry refuses a change, and says by a code why
    |- StorageError           `learning.storage` cannot be used, or holds what nobody can read
    |- Unavailable            no worker of a needed role lives (an HTTP 503)
    |- Overloaded             more is asked for than the queues hold (an HTTP 429)
    |  `- RateLimited         more than the API key may use (an HTTP 429)
    `- IntegrityError         a pool's books do not add up: a defect of ours

Users catch `PacelineError`. `assert` is kept for what only we can break.
"""

from __future__ import annotations

from collections.abc import Mapping


class PacelineError(Exception):
    """Base of every error Paceline raises on purpose."""


class ConfigError(PacelineError):
    """A configuration value is outside its legal range; the message names field, value and range."""


class RequestError(PacelineError):
    """A request cannot be served as sent. Becomes an HTTP answer in OpenAI's error shape."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class ModelError(PacelineError):
    """Weights, tokenizer or model family cannot be used; the message names the file and the reason."""


class WireError(PacelineError):
    """A framed connection broke, or its peer failed to prove that it knows the link secret."""


class TransferError(PacelineError):
    """A KV transfer was refused or broken off. Carries a short reason used as a metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class LinkPoisoned(TransferError):
    """The two-rank process group of a link timed out or lost its peer; it is dropped, never reused."""


class GangLost(PacelineError):
    """A rank of a tensor-parallel worker died, hangs or never came; the worker ends with it and is replaced as a whole."""


class RegistryError(PacelineError):
    """The registry refuses what it was asked for. `code`: unknown_version, illegal_move, pinned, bad_value, newer_schema."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class StorageError(PacelineError):
    """`learning.storage` cannot be used, or holds what nobody can read; the message names the file and the reason."""


class Unavailable(PacelineError):
    """No worker of a role this request needs is alive, and waiting longer was not allowed."""


class Overloaded(PacelineError):
    """The queues of all decode workers are full; the request was not begun. `retry_after_s` is measured."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """An API key has used up what it may; the request was not begun. `headers`: how it stands, for its client."""

    def __init__(self, message: str, retry_after_s: float, headers: Mapping[str, str]) -> None:
        super().__init__(message, retry_after_s)
        self.headers = headers


class IntegrityError(PacelineError):
    """The books of a pool do not add up. Raised by `check_integrity`, with the numbers."""
