"""Peers' Pythons, models, options -> every contest of a run, in order, into a report.

Two models: the pair that was asked for, on tasks its draft knows, and a random one several times as large, whose
weights fit in no cache and which nobody has tuned for. It is written here from a seed.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from paceline.deploy.bench import inprocess, report
from paceline.deploy.bench.check import Judge
from paceline.deploy.bench.figures import Count
from paceline.deploy.bench.peers.contest import Contest, Ours, Size
from paceline.deploy.bench.suite import Options, Say
from paceline.deploy.bench.workload import Workload

RANDOM = "random"
"""The scenario that runs on the random model."""
SCENARIOS = ("domains", RANDOM)
TOKENS = 96
"""Of each request: long enough that steps, not prompts, are most of it."""


class PeerSuite:
    """One run."""

    def __init__(
        self, folders: tuple[Path, Path], options: Options, peers: Mapping[str, Path], say: Say
    ) -> None:
        """`peers`: name -> Python, in the order they are to be run."""
        self._target, self._draft = folders
        self._options = options
        self._peers = peers
        self._say = say
        self._workload = Workload(self._target, seed=options.seed)
        self.report = report.Report(self._card(), options.quick, options.pairs, report.versions())

    def _card(self) -> dict[str, str]:
        options = self._options
        length = f"{options.pairs} pairs of about {options.block_s:g} s a block"
        versions = ", ".join(f"{name} {number}" for name, number in report.versions().items())
        return {
            "peers": ", ".join(self._peers),
            "machine": f"{report.cpu_name()}, {inprocess.thread_counts()[-1]} cores, all of them for whoever runs",
            "run": f"{length}{'; quick: too few to decide anything' if options.quick else ''}; {versions}",
        }

    def measure(self) -> None:
        """All figures; a peer is gone when its last one is there."""
        options = self._options
        size = Size(options.streams, options.pairs, options.block_s, min(TOKENS, options.max_tokens))
        with _ended_in_order(), tempfile.TemporaryDirectory(prefix="paceline-peers-") as folder:
            work = Path(folder)
            for scenario in options.scenarios or SCENARIOS:
                ours = self._ours(scenario, work)
                for name, python in self._peers.items():
                    made = work / scenario / name
                    made.mkdir(parents=True)
                    contest = Contest(name, python, ours, size, made, self._say)
                    try:
                        contest.measure()
                    finally:  # an interrupted run shows what is finished
                        self._note(contest)

    def _note(self, contest: Contest) -> None:
        outcome = contest.outcome
        for row in outcome.rows:
            self.report.add_peer(row)
            self.report.complaints.extend(
                f"{row.figure}: another text: {difference}" for difference in row.different[:3]
            )
        self.report.trials.extend(outcome.trials)
        self.report.not_run.extend(outcome.not_run)

    def _ours(self, scenario: str, work: Path) -> Ours:
        """The engine on the scenario's model, with the number of threads that is fastest for it."""
        self._say(f"{scenario}: loading our engine")
        target, draft = self._target, self._draft
        if scenario == RANDOM:
            target = work / "random-model"
            write_random(target, self._workload, self._options.seed)
        runner = inprocess.load(target)

        def probe() -> Count:
            return inprocess.step_block(runner, 1, 16, 32)(0)

        return Ours(
            scenario=scenario,
            target=target,
            draft=None if scenario == RANDOM else draft,
            runner=runner,
            make_drafter=None if scenario == RANDOM else inprocess.drafters(draft),
            num_threads=self._options.threads or inprocess.best_threads(probe),
            workload=self._workload,
            judge=Judge(target),
        )


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does: a peer that is stopped at that moment would stay for ever."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_random(folder: Path, workload: Workload, seed: int) -> None:
    """A Llama of 26 M random weights with the tokenizer's ids; 105 MB as float32."""
    config = inprocess.config_26m(len(workload.tokenizer), 2048)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
