"""Models, options -> every measurement of a run, in order, into a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.errors import ConfigError
from paceline.cluster.types import SOURCE_NAMES, Request
from paceline.deploy.bench import inprocess, report
from paceline.deploy.bench.check import Judge
from paceline.deploy.bench.figures import Block, Count, alternate, rate, ratio, unit_seconds
from paceline.deploy.bench.peers.here import Outputs, Peer, Transformers
from paceline.deploy.bench.workload import SCENARIOS, Workload

STEP_NODES = (1, 2, 4, 8, 16, 32)
PEER_TOKENS = 96
"""Of each request to a peer, whose batch runs to the end of its longest."""
Say = Callable[[str], None]
"""Progress, for whoever waits."""


@dataclass(frozen=True, slots=True)
class Options:
    """How long and how much."""

    scenarios: tuple[str, ...]
    """None named: all."""
    streams: tuple[int, ...]
    pairs: int
    max_tokens: int
    block_s: float
    """Aimed at for the slower side of a pair; a block holds whole requests, so it may take longer."""
    samples: int
    """Greedy requests of each row that the judge recomputes."""
    seed: int
    peers: bool
    quick: bool
    """Said on the card; the numbers above are small then."""
    threads: int
    """Of the engine; 0 measures which number is fastest."""
    waiting: str
    """What idle threads do, in words."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.scenarios) - set(SCENARIOS))
        if unknown:
            raise ConfigError(f"scenario {unknown[0]!r}: expected one of {', '.join(SCENARIOS)}")
        for name, value in (("pairs", self.pairs), ("max_tokens", self.max_tokens), *self._streams()):
            if value < 1:
                raise ConfigError(f"{name}={value}: expected 1 or more")

    def _streams(self) -> Iterator[tuple[str, int]]:
        return (("streams", number) for number in self.streams)


class Suite:
    """One run: what is loaded once, and the measurements in order."""

    def __init__(
        self, folders: tuple[Path, Path], options: Options, drafter: inprocess.DrafterFactory | None, say: Say
    ) -> None:
        say("loading the models")
        self._target, self._draft = folders
        self._options = options
        self._say = say
        self._runner = inprocess.load(self._target)
        self._make_drafter = drafter or inprocess.drafters(self._draft)
        self._workload = Workload(self._target, seed=options.seed)
        self._judge = Judge(self._target)
        say("measuring memory bandwidth and thread counts")
        self._bandwidth = inprocess.memory_bandwidth()
        self._threads = options.threads or inprocess.best_threads(self._probe)
        self._weight_bytes = self._runner.weight_bytes
        self.report = report.Report(self._card(), options.quick, options.pairs, report.versions())

    def _probe(self) -> Count:
        return inprocess.step_block(self._runner, 1, 16, 32)(0)

    def _card(self) -> dict[str, str]:
        draft_bytes = inprocess.weight_bytes(self._draft)
        ceiling = self._bandwidth / self._weight_bytes
        cores = inprocess.thread_counts()[-1]
        versions = ", ".join(f"{name} {number}" for name, number in report.versions().items())
        found = "as asked" if self._options.threads else "the fastest of those tried"
        length = f"{self._options.pairs} pairs of about {self._options.block_s:g} s a block"
        return {
            "target": f"{self._runner.version}  {self._weight_bytes / 1e6:.1f} MB for a step; {self._runner.path}",
            "draft": f"{draft_bytes / 1e6:.1f} MB as float32",
            "machine": f"{report.cpu_name()}, {cores} cores; memory {self._bandwidth / 1e9:.1f} GB/s (copy)",
            "threads": f"{self._threads}, {found}; {self._options.waiting}",
            "ceiling": f"{ceiling:.0f} tokens/s if a step cost no more than reading the weights from memory",
            "run": f"{length}{'; quick: too few to decide anything' if self._options.quick else ''}; {versions}",
        }

    def measure(self) -> None:
        """All figures, the ratio table first."""
        for name in self._options.scenarios or SCENARIOS:
            for streams in self._options.streams:
                self._say(f"{name}, {streams} streams")
                self._scenario(name, streams)
        self._say("step times")
        self._steps()
        self._say("prompts")
        self._prefill()
        if self._options.peers:
            self._peers()

    # -- with drafts against without ---------------------------------------------------------------------

    def _scenario(self, name: str, streams: int) -> None:
        options, exactness = self._options, self.report.exactness
        with inprocess.threads(self._threads):
            drafter = self._make_drafter(self._runner)
        engines = {
            "off": inprocess.new_engine(self._runner, None, streams),
            "on": inprocess.new_engine(self._runner, drafter, streams),
        }
        latest: dict[str, inprocess.Tally] = {}
        total = inprocess.Tally()

        def run(side: str, requests: list[Request]) -> inprocess.Tally:
            with inprocess.threads(self._threads):
                latest[side] = inprocess.generate(engines[side], requests, streams)
            return latest[side]

        warm_up = self._workload.requests(name, 1_000_000, max(4, streams), max_tokens=options.max_tokens)
        slower = max(run(side, warm_up).seconds for side in engines)
        num = block_size(slower, len(warm_up), streams, options.block_s)

        def requests_of(index: int) -> list[Request]:
            return self._workload.requests(name, index * num, num, max_tokens=options.max_tokens)

        def off(index: int) -> Count:
            return run("off", requests_of(index)).count

        def on(index: int) -> Count:
            requests = requests_of(index)
            tally = run("on", requests)
            total.add(tally)
            self._judge.compare(exactness, requests, tally.outputs, latest["off"].outputs)
            if index == 0:
                greedy = [r for r in requests if r.sampling.temperature == 0][: options.samples]
                self._judge.sample(exactness, greedy, tally.outputs)
            return tally.count

        counts = alternate({"off": off, "on": on}, options.pairs)
        self.report.add_row(_row(name, streams, counts, total))

    # -- steps and prompts -------------------------------------------------------------------------------

    def _steps(self) -> None:
        context = min(128, self._runner.max_context // 4)
        room = self._runner.max_context - context - 2 * max(STEP_NODES) - 8
        with inprocess.threads(self._threads):
            probe = inprocess.step_block(self._runner, 1, 16, context)(0)
        num_steps = max(8, min(room, round(self._options.block_s / 2 * probe.rate)))
        blocks: dict[str, Block] = {
            str(nodes): self._threaded(inprocess.step_block(self._runner, nodes, num_steps, context))
            for nodes in STEP_NODES
        }
        alternate(blocks, 1)  # warm-up
        counts = alternate(blocks, self._options.pairs)
        figures = self.report.figures
        for nodes, taken in counts.items():
            figures[f"step.t{nodes}"] = unit_seconds(taken).times(1e6)
        figures["step.t8_t1"] = ratio(counts["1"], counts["8"])
        figures["step.t16_t1"] = ratio(counts["1"], counts["16"])
        floor_s = self._weight_bytes / self._bandwidth
        figures["step.floor"] = figures["step.t1"].times(1e-6 / floor_s)

    def _prefill(self) -> None:
        num_tokens = min(512, self._runner.max_context // 2)
        with inprocess.threads(self._threads):
            probe = inprocess.prefill_block(self._runner, num_tokens, 1)(0)
        num_prompts = max(1, round(self._options.block_s / 2 / probe.seconds))
        block = self._threaded(inprocess.prefill_block(self._runner, num_tokens, num_prompts))
        counts = alternate({"prefill": block}, self._options.pairs)
        self.report.figures["prefill.tokens_s"] = rate(counts["prefill"])

    def _threaded(self, block: Block) -> Block:
        return inprocess.with_threads(self._threads, block)

    # -- peers -------------------------------------------------------------------------------------------

    def _peers(self) -> None:
        peers = Transformers(self._target, self._draft)
        largest = max(self._options.streams)
        one = self._workload.requests("domains", 0, 1, max_tokens=16, greedy=True, stops=False)
        many = self._workload.requests("domains", 0, largest, max_tokens=8, greedy=True, stops=False)
        self._say("transformers, batch 1")
        self._peer("engine.vs_hf.1", peers.one_by_one(one), 1, drafts=False)
        self._say(f"transformers, padded batch of {largest}")
        self._peer(f"engine.vs_hf_batch.{largest}", peers.batched(many), largest, drafts=False)
        self._say("transformers, assisted")
        self._peer("engine.vs_hf_assisted.1", peers.assisted(one), 1, drafts=True)

    def _peer(self, figure: str, peer: Peer, streams: int, *, drafts: bool) -> None:
        with inprocess.threads(self._threads):
            drafter = self._make_drafter(self._runner) if drafts else None
        engine = inprocess.new_engine(self._runner, drafter, streams)
        theirs: Outputs = {}
        num_same = num_requests = 0

        def first(num: int, index: int) -> list[Request]:
            tokens = min(PEER_TOKENS, self._options.max_tokens)
            return self._workload.requests(
                "domains", index * num, num, max_tokens=tokens, greedy=True, stops=False
            )

        seconds = peer.block(lambda index: first(streams, index), lambda index, outputs: None)(0).seconds
        # A padded batch is one call; the others go on until the block is full.
        num = streams if streams > 1 else block_size(seconds, 1, 1, self._options.block_s)

        def ours(index: int) -> Count:
            nonlocal num_same, num_requests
            with inprocess.threads(self._threads):
                tally = inprocess.generate(engine, first(num, index), streams)
            num_same += sum(theirs[name] == tokens for name, tokens in tally.outputs.items())
            num_requests += len(tally.outputs)
            return tally.count

        block = peer.block(lambda index: first(num, index), lambda index, outputs: theirs.update(outputs))
        counts = alternate({"peer": block, "ours": ours}, self._options.pairs)
        self.report.add_peer(
            report.PeerRow(
                figure,
                "with drafts" if drafts else "without drafts",
                peer.text,
                streams,
                peer.num_threads,
                rate(counts["ours"]),
                rate(counts["peer"]),
                ratio(counts["ours"], counts["peer"]),
                num_same,
                num_requests,
            )
        )


WAVES = 3


def block_size(seconds: float, num: int, streams: int, block_s: float) -> int:
    """Requests of a block: waves of `streams`, in fours, so that two domains and both temperatures are in it.

    Three waves at least. Where some requests end sooner by their drafts others take their places, as where people are
    served; in a block of one wave the last ones would run alone, and a gain for some would count for nothing.
    """
    waves = max(WAVES, round(block_s / (seconds / num * streams)))
    return -(-waves * streams // 4) * 4


def _row(name: str, streams: int, counts: dict[str, list[Count]], total: inprocess.Tally) -> report.Row:
    tokens = max(1, total.num_tokens)
    return report.Row(
        name,
        streams,
        rate(counts["off"]),
        rate(counts["on"]),
        ratio(counts["on"], counts["off"]),
        total.num_tokens / max(1, total.num_turns),
        {source: total.by_source[index] / tokens for index, source in enumerate(SOURCE_NAMES)},
        total.num_drafted / tokens,
    )
