"""Log events -> one JSON line each on stderr, which Ray writes to the process's own file.

Lines of libraries that use `logging` come out in the same shape, from warnings on.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def configure_logs(role: str, level: str = "info") -> None:
    """Structured logs for this process from `level` on; every line carries its role."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            *shared,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=role)
    _format_others(shared, role)


def _format_others(shared: list[Any], role: str) -> None:
    """`logging`'s root writes JSON too. Loggers with handlers of their own, such as Ray's, keep them."""

    def add_role(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
        return {"process": role, **event}  # threads of libraries have contexts of their own

    render: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name, add_role], processors=render
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
