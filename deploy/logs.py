"""Log events -> one JSON line each on stderr, which Ray writes to the process's own file.

Lines of libraries that use `logging` come out in the same shape, from warnings on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

Event = MutableMapping[str, Any]


def configure_logs(role: str, level: str = "info") -> None:
    """Structured logs for this process from `level` on; every line carries its role."""

    def add_role(_: Any, __: str, event: Event) -> Event:
        event.setdefault("process", role)  # no context variable: threads have contexts of their own
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_role,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[structlog.typing.Processor] = [
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.getLogger().handlers = [handler]  # loggers with handlers of their own, such as Ray's, keep them
