"""Events from anywhere in a process -> one JSON line each, with its role, its request and nothing below its level."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SCRIPT = """
import logging, threading, structlog
from paceline.deploy.logs import configure_logs

configure_logs("decode", {level!r})
log = structlog.get_logger("x")
log.debug("fine")
log.info("kv_sent", request="a", ms=1.5)
with structlog.contextvars.bound_contextvars(request="b"):
    log.warning("odd", text='two\\nlines {{"process": "forged"}}')
thread = threading.Thread(target=lambda: log.info("from_a_thread"))
thread.start(); thread.join()
try:
    1 / 0
except ZeroDivisionError:
    log.exception("broken")
    logging.getLogger("library").exception("of %s", "others")
logging.getLogger("library").info("quiet")
"""


def lines(level: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(level=level)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_event_is_one_line_of_json_with_its_role() -> None:
    """From threads as well, whose contexts are their own; what a client wrote cannot begin a line."""
    found = {line["event"]: line for line in lines("info")}

    assert set(found) == {"kv_sent", "odd", "from_a_thread", "broken", "of others"}
    assert {line["process"] for line in found.values()} == {"decode"}
    assert (found["kv_sent"]["request"], found["kv_sent"]["ms"], found["odd"]["request"]) == ("a", 1.5, "b")
    assert found["odd"]["text"].startswith("two\nlines")
    assert (
        "ZeroDivisionError" in found["broken"]["exception"]
        and "ZeroDivisionError" in found["of others"]["exception"]
    )
    assert found["of others"]["logger"] == "library"
    assert all(line["level"] and line["timestamp"].endswith("Z") for line in found.values())


def test_a_level_leaves_out_what_is_below_it() -> None:
    assert {line["event"] for line in lines("warning")} == {"odd", "broken", "of others"}
    assert "fine" in {line["event"] for line in lines("debug")}
