"""Checks -> findings: a check that fails in a way that nobody thought of is a finding as well, not a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from paceline.cluster.errors import PacelineError

Level = Literal["ok", "warn", "fail", "skip"]
"""warn: it works, and will not for long, or not well. fail: it does not work. skip: there was nothing to look at."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check came to."""

    check: str
    level: Level
    found: str
    what_to_do: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, what_to_do: str) -> Finding:
    return Finding(check, "warn", found, what_to_do)


def fail(check: str, found: str, what_to_do: str) -> Finding:
    return Finding(check, "fail", found, what_to_do)


def skip(check: str, found: str) -> Finding:
    return Finding(check, "skip", found)


Check = tuple[str, Callable[[], Finding | Iterable[Finding]]]
"""A name, and what gives one finding or several."""


def run(checks: Iterable[Check]) -> Iterator[Finding]:
    """One after the other; each whole before the next begins."""
    for name, check in checks:
        try:
            found = check()
            yield from [found] if isinstance(found, Finding) else list(found)
        except PacelineError as error:  # these say themselves what was expected
            yield fail(name, str(error), "as it says")
        except Exception as error:  # noqa: BLE001 - one bad check must not hide what the others find
            yield fail(name, f"the check itself failed: {type(error).__name__}: {error}", "please report it")
