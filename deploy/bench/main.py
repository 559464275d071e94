"""Scenarios, streams and pairs -> the card, the tables and the JSON line of `paceline bench`.

Nothing here imports torch before `run` does: how idle OpenMP threads wait is read once, when torch is loaded.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline.cluster.config import DecodeConfig, model_folder
from paceline.cluster.pair import check_pair

if TYPE_CHECKING:
    from paceline.deploy.bench.http import HttpSuite
    from paceline.deploy.bench.inprocess import DrafterFactory
    from paceline.deploy.bench.peers.suite import PeerSuite
    from paceline.deploy.bench.suite import Suite

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Idle threads sleep, as in the cluster's workers: where cores are shared, spinning costs far more than it saves."""


def run(
    *,
    target: str = "bundled/target",
    draft: str = "bundled/draft",
    scenarios: Sequence[str] | None = None,
    streams: Sequence[int] = (1, 4, 16),
    pairs: int = 30,
    quick: bool = False,
    threads: int = 0,
    max_tokens: int = 384,
    samples: int = 8,
    seed: int = 0,
    peers: bool = True,
    drafter: DrafterFactory | None = None,
    json_path: Path | None = None,
    out: Console | None = None,
    err: Console | None = None,
) -> dict[str, Any]:
    """Measure, print, and return the object of the JSON line.

    Args:
        target, draft: model folders or names of bundled ones.
        scenarios: domains, unseen, copy, random; None takes all.
        quick: 3 pairs of short blocks. The figures are there, their intervals say little.
        threads: of the engine; 0 measures which number is fastest.
        drafter: makes the drafter that is measured; None takes copies and the draft model under a controller, in process.
        json_path: the JSON line is written there as well.
    Raises:
        ConfigError: an argument, or a model folder that is not there. ModelError: the two share no tokenizer.
    """
    waiting = _wait_passively()
    from paceline.deploy.bench.report import console
    from paceline.deploy.bench.suite import Options, Suite

    out, err = out or console(), err or Console(stderr=True, highlight=False)
    options = Options(
        scenarios=tuple(scenarios or ()),
        streams=tuple(streams),
        pairs=min(pairs, 3) if quick else pairs,
        max_tokens=min(max_tokens, 64) if quick else max_tokens,
        block_s=0.1 if quick else 0.5,
        samples=min(samples, 2) if quick else samples,
        seed=seed,
        peers=peers,
        quick=quick,
        threads=threads,
        waiting=waiting,
    )
    folders = model_folder(target), model_folder(draft)
    check_pair(*folders)
    with _quiet_loading(), _speaker(err) as say:
        return _measure(Suite(folders, options, drafter, say), out, json_path)


def run_http(
    *,
    target: str = "bundled/target",
    draft: str = "bundled/draft",
    scenarios: Sequence[str] | None = None,
    streams: Sequence[int] = (1, 4, 16, 64),
    pairs: int = 30,
    quick: bool = False,
    threads: int = 0,
    max_tokens: int = 384,
    seed: int = 0,
    settings: Sequence[str] = (),
    json_path: Path | None = None,
    out: Console | None = None,
    err: Console | None = None,
) -> dict[str, Any]:
    """The same for a whole cluster on this machine, over HTTP.

    Args:
        scenarios: None takes the tasks that the draft knows.
        threads: of the decode worker and of the engine it is compared with; 0 takes the decode worker's default.
        settings: `section.field=value` for the cluster.
    Raises:
        ConfigError: likewise. PacelineError: the cluster did not start, or a request failed.
    """
    waiting = _wait_passively()
    from paceline.deploy.bench.http import HttpSuite
    from paceline.deploy.bench.report import console
    from paceline.deploy.bench.suite import Options

    out, err = out or console(), err or Console(stderr=True, highlight=False)
    options = Options(
        scenarios=tuple(scenarios or ("domains",)),
        streams=tuple(streams),
        pairs=min(pairs, 3) if quick else pairs,
        max_tokens=min(max_tokens, 64) if quick else max_tokens,
        block_s=0.1 if quick else 2.0,
        samples=0,
        seed=seed,
        peers=False,
        quick=quick,
        threads=threads or DecodeConfig().threads,
        waiting=waiting,
    )
    folders = model_folder(target), model_folder(draft)
    check_pair(*folders)
    with _quiet_loading(), _speaker(err) as say:
        return _measure(HttpSuite(folders, options, settings, say), out, json_path)


def run_peers(
    asked: Sequence[str],
    *,
    target: str = "bundled/target",
    draft: str = "bundled/draft",
    scenarios: Sequence[str] | None = None,
    streams: Sequence[int] = (1, 4, 16),
    pairs: int = 30,
    quick: bool = False,
    threads: int = 0,
    seed: int = 0,
    json_path: Path | None = None,
    out: Console | None = None,
    err: Console | None = None,
) -> dict[str, Any]:
    """The engine in process against other engines in their own Pythons, in alternation.

    Args:
        asked: `all`, or names of peers, or NAME=PYTHON.
        scenarios: None takes the tasks that the draft knows, and a random model of 26 M weights on `random`.
    Raises:
        ConfigError: likewise, and for a peer that is unknown or was not built.
    """
    waiting = _wait_passively()
    from paceline.deploy.bench.peers import environments
    from paceline.deploy.bench.peers.suite import PeerSuite
    from paceline.deploy.bench.report import console
    from paceline.deploy.bench.suite import Options

    out, err = out or console(), err or Console(stderr=True, highlight=False)
    peers = environments.find(asked)
    options = Options(
        scenarios=tuple(scenarios or ()),
        streams=tuple(streams),
        pairs=min(pairs, 3) if quick else pairs,
        max_tokens=16 if quick else 96,
        block_s=0.1 if quick else 0.7,
        samples=0,
        seed=seed,
        peers=True,
        quick=quick,
        threads=threads,
        waiting=waiting,
    )
    folders = model_folder(target), model_folder(draft)
    check_pair(*folders)
    with _quiet_loading(), _speaker(err) as say:
        return _measure(PeerSuite(folders, options, peers, say), out, json_path)


def _measure(suite: Suite | HttpSuite | PeerSuite, out: Console, json_path: Path | None) -> dict[str, Any]:
    """Card, measurements, tables, JSON; what there is of them if the user interrupts."""
    suite.report.show_card(out)
    try:
        suite.measure()
    except KeyboardInterrupt:
        suite.report.is_interrupted = True
    suite.report.show(out)
    found = suite.report.as_json()
    if json_path is not None:
        json_path.write_text(json.dumps(found) + "\n")
    return found


def _wait_passively() -> str:
    """Set how threads wait, unless the caller did or it is too late; in words, for the card."""
    if "torch" not in sys.modules:
        for name, value in PASSIVE.items():
            os.environ.setdefault(name, value)
    passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    return "idle ones sleep" if passive else "idle ones spin"


@contextmanager
def _speaker(err: Console) -> Iterator[Callable[[str], None]]:
    """Progress on stderr: a spinner on a terminal, else a line for each stage."""
    if not err.is_terminal:
        yield lambda text: err.print(f"  {text}", markup=False)
        return
    with err.status("starting") as spinner:
        yield lambda text: spinner.update(text)


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bars and no advice from transformers between our lines."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
