"""The same weights, prompts and cores -> what `transformers` makes of them in this very process, at its best settings.

What `paceline bench` runs without being asked for peers: no environment to build, no process to start. Greedy
throughout: only then do both sides owe the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.types import Request
from paceline.deploy.bench.figures import Block, Count, timed
from paceline.deploy.bench.inprocess import best_threads, thread_counts, threads
from paceline.deploy.bench.peers.drive_transformers import Driver, plain, speculative

Outputs = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to run requests, tuned."""

    text: str
    num_threads: int
    generate: Callable[[Sequence[Request]], Outputs]

    def block(
        self, requests_of: Callable[[int], list[Request]], keep: Callable[[int, Outputs], None]
    ) -> Block:
        """Whole requests of a round; `keep` gets what came out, after the clock has stopped."""

        def run(index: int) -> Count:
            requests = requests_of(index)
            outputs: Outputs = {}
            with threads(self.num_threads):
                seconds = timed(lambda: len(outputs.update(self.generate(requests)) or outputs)).seconds
            keep(index, outputs)
            return Count(sum(len(tokens) for tokens in outputs.values()), seconds)

        return run


class Transformers:
    """Target and draft as plain Hugging Face models."""

    def __init__(self, target: Path, draft: Path) -> None:
        self._folders = str(target), str(draft)
        self._driver = self._open(plain(thread_counts())[-1])

    def _open(self, settings: dict[str, object]) -> Driver:
        return Driver(*self._folders, work="", max_streams=0, max_len=0, settings=settings)

    def one_by_one(self, probe: list[Request]) -> Peer:
        """`generate`, batch 1."""
        best = best_threads(lambda: generate(self._driver, probe, 1))
        return Peer("generate, batch 1", best, lambda requests: generate(self._driver, requests, 1))

    def batched(self, probe: list[Request]) -> Peer:
        """`generate`, all requests in one left-padded batch."""
        best = best_threads(lambda: generate(self._driver, probe, len(probe)))
        return Peer(
            f"generate, padded batch of {len(probe)}",
            best,
            lambda requests: generate(self._driver, requests, len(requests)),
        )

    def assisted(self, probe: list[Request]) -> Peer:
        """Assisted generation with the fastest of its schedules."""
        best = best_threads(lambda: generate(self._driver, probe, 1))
        drivers = [self._open(way) for way in speculative({"name": f"{best} threads", "threads": best})]

        def seconds(driver: Driver) -> float:
            with threads(best):
                return min(timed(lambda: len(generate(driver, probe, 1))).seconds for _ in range(2))

        fastest = min(drivers, key=seconds)
        return Peer(fastest.text, best, lambda requests: generate(fastest, requests, 1))


def generate(driver: Driver, requests: Sequence[Request], streams: int) -> Outputs:
    """Requests of equal length."""
    prompts = [list(request.prompt_ids) for request in requests]
    outputs = driver.run(prompts, requests[0].max_tokens, streams)
    return {request.id: tokens for request, tokens in zip(requests, outputs, strict=True)}
