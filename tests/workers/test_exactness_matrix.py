"""Cache x pool x drafter x chunks x temperature -> one text: the one each request gets alone, by plain decoding.

Each cell also has to show that what it is about happened: prefixes were found, blocks were taken away, drafts were
accepted, prompts came in pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_DRAFT, SOURCE_SUFFIX, SOURCE_TARGET, Request, Sampling
from paceline.workers.drafters.base import Drafter
from paceline.workers.drafters.suffix import SuffixDrafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner

VOCAB = 211
LENGTH = 40
SYSTEM = tuple(np.random.default_rng(4).integers(3, VOCAB, 22).tolist())
RunnerFactory = Callable[..., ModelRunner]
Texts = dict[str, list[int]]


def requests(temperature: float) -> list[Request]:
    """Eight that begin alike, differ from some point on, and end at different lengths.

    The tails count up the same few tokens again and again, so copies of the past are sometimes right.
    """
    return [
        Request(
            f"r{i}",
            (*SYSTEM[: 22 - 3 * (i % 4)], *[50 + i % 3, 51, 52, 53] * (1 + i % 5)),
            Sampling(i, temperature),
            LENGTH - 2 * i,
            priority=i % 2,
        )
        for i in range(8)
    ]


class Bushes(Drafter):
    """Knows the text: right and wrong tokens at each depth, in an order that differs from step to step."""

    name = "bushes"

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self._random = np.random.default_rng(8)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        return [self._tree(stream) for stream in streams]

    def _tree(self, stream: Stream) -> Tree | None:
        future = self.texts[stream.request.id][stream.num_output : stream.num_output + 3]
        tokens: list[int] = []
        parents: list[int] = []
        spine = -1
        for right in future:
            wrong = int((right + self._random.integers(1, VOCAB)) % VOCAB)
            is_right_first = self._random.random() < 0.5
            tokens += [right, wrong] if is_right_first else [wrong, right]
            parents += [spine, spine]
            spine = len(tokens) - (2 if is_right_first else 1)
        return Tree.build(int(stream.token_ids[-1]), tokens, parents) if tokens else None


@pytest.fixture(scope="module")
def alone(make_runner: RunnerFactory) -> Callable[[float], Texts]:
    """Temperature -> each request's text from an engine of its own: no cache, no drafts, no chunks, no company."""
    made: dict[float, Texts] = {}

    def texts(temperature: float) -> Texts:
        if temperature not in made:
            made[temperature] = {}
            for request in requests(temperature):
                engine = Engine(make_runner("llama"), token_budget=256, max_streams=1, prefix_cache=False)
                made[temperature] |= engine.run([request])
        return made[temperature]

    return texts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("budget", [12, 256])
@pytest.mark.parametrize("drafts", ["none", "suffix", "bushes"])
@pytest.mark.parametrize("num_blocks", [200, 24])
@pytest.mark.parametrize("cached", [False, True])
def test_every_mode_gives_the_text_of_a_request_alone(
    cached: bool,
    num_blocks: int,
    drafts: str,
    budget: int,
    temperature: float,
    make_runner: RunnerFactory,
    alone: Callable[[float], Texts],
) -> None:
    """Two waves of the same eight requests, the second arriving while the first runs."""
    expected = alone(temperature)
    drafter = {"none": lambda: None, "suffix": SuffixDrafter, "bushes": lambda: Bushes(expected)}[drafts]()
    engine = Engine(
        make_runner("llama", num_blocks=num_blocks),
        token_budget=budget,
        max_streams=6,
        drafter=drafter,
        prefix_cache=cached,
    )
    sources: Counter[int] = Counter()
    texts: dict[str, list[int]] = {}
    num_preempted = num_chunks = num_steps = 0
    for wave in range(2):
        for request in requests(temperature):
            engine.add(request, epoch=wave)
        for _ in range(20 if wave == 0 else 4000):
            before = {stream.key: stream.num_computed for stream in engine.scheduler}
            result = engine.step()
            num_steps += 1
            engine.scheduler.check_integrity()
            for stream in engine.scheduler:
                moved = stream.num_computed - before[stream.key]
                num_chunks += moved > 1 and stream.num_computed < stream.num_prompt
            for emission in result.emissions:
                texts.setdefault(emission.stream.key, []).extend(emission.tokens)
                sources.update(emission.sources)
                num_preempted += emission.stream.num_preempted if emission.finish else 0
            if not len(engine.scheduler):
                break

    assert texts == {f"{name}/{wave}": text for name, text in expected.items() for wave in range(2)}
    assert engine.pool.num_used == 0
    num_hits = engine._metrics.prefix_hit_tokens._value.get()
    assert num_hits > 100 if cached else num_hits == engine.pool.num_findable == 0
    assert num_preempted > 0 if num_blocks == 24 else num_preempted == 0
    assert num_chunks > 3 if budget == 12 else num_chunks == 0
    accepted = {"none": SOURCE_TARGET, "suffix": SOURCE_SUFFIX, "bushes": SOURCE_DRAFT}[drafts]
    assert set(sources) == {SOURCE_TARGET, accepted}
    assert sources[accepted] > 10
