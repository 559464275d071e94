"""Seven families on two ranks -> the logits and texts of one; four ranks where there are two KV heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from paceline.cluster.learning.capture import ShardWriter
from paceline.cluster.learning.config import CaptureConfig
from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_DRAFT, Logprobs, Request, Sampling
from paceline.workers.capture import Recorder, _Taken
from paceline.workers.drafters.base import Drafter
from paceline.workers.engine import Engine
from paceline.workers.model_batch import BatchBuilder
from paceline.workers.model_runner import ModelRunner
from paceline.workers.parallel.runner import ParallelRunner
from paceline.workers.raw_logits import RawLogits, whole

Parallel = Callable[..., ParallelRunner]
Plain = Callable[..., ModelRunner]

FAMILIES = [
    *("llama", "gemma3", "phi3", "gpt_oss"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mistral", "mixtral")),
]
ATOL = 1e-4
VOCAB, LENGTH = 211, 24


def asked(name: str, num: int, sampling: Sampling, **how: object) -> Request:
    ids = np.random.default_rng(num).integers(3, VOCAB, num).tolist()
    return Request(name, tuple(ids), sampling, LENGTH, **how)  # type: ignore[arg-type]


REQUESTS = [
    asked("greedy", 5, Sampling(1, 0.0)),
    asked("plain", 37, Sampling(2**64 - 1)),
    asked("filters", 3, Sampling(3, 0.9, 50, 0.95, 0.01)),
    asked("nucleus", 21, Sampling(4, 1.4, 0, 0.8, choice=3, prompt_index=2)),
    asked(
        "penalties",
        9,
        Sampling(5, 0.8, repetition_penalty=1.3, presence_penalty=0.4, logit_bias=((107, 4.0), (108, 4.0))),
    ),
    asked("logprobs", 12, Sampling(6, 0.7, 20), logprobs=3, prompt_logprobs=2),
]


class Branches(Drafter):
    """Knows the text; a wrong sibling comes before the right node, so that accepted KV has to be moved."""

    name = "branches"

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self._texts = texts

    def open(self, stream: Stream) -> None: ...
    def close(self, stream: Stream) -> None: ...
    def observe(self, streams: Sequence[Stream]) -> None: ...

    def version(self, stream: Stream) -> str:
        return "1"

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        return [self._tree(stream) for stream in streams]

    def _tree(self, stream: Stream) -> Tree | None:
        at = stream.num_output
        future = self._texts[stream.request.id][at : at + 3]
        if len(future) < 3:
            return None
        first, second, third = future
        wrong = [(token + 1 + at) % VOCAB for token in future]
        return Tree.build(
            int(stream.token_ids[-1]),
            [wrong[0], first, wrong[1], second, third if at % 4 else wrong[2]],
            [-1, -1, 1, 1, 3],
        )


def drive(
    runner: ModelRunner, drafter: Drafter | None = None
) -> tuple[dict[str, list[int]], list[Logprobs], int]:
    """Texts, the log-probabilities that were asked for, and how many draft tokens were accepted."""
    engine = Engine(runner, token_budget=32, max_streams=4, drafter=drafter)
    texts: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
    told: list[Logprobs] = []
    num_accepted = 0
    for request in REQUESTS:
        engine.add(request)
    while len(engine.scheduler):
        for emission in engine.step().emissions:
            assert emission.finish != "error", emission.error
            texts[emission.stream.request.id].extend(emission.tokens)
            told += [found for found in (emission.prompt_logprobs, emission.logprobs) if found is not None]
            num_accepted += emission.sources.count(SOURCE_DRAFT)
        engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0
    return texts, told, num_accepted


def numbers(told: list[Logprobs]) -> np.ndarray:
    return np.concatenate([np.frombuffer(found.own, "<f4") for found in told])


def rows(runner: ModelRunner) -> torch.Tensor:
    """Logits of a chunk's last row and of a tree behind it."""
    ids = REQUESTS[1].prompt_ids
    table, found = list(range(12)), []
    tree = Tree.build(int(ids[30]), [11, 12, 13, 14, 15], [-1, 0, -1, 2, 0])
    for build in (
        lambda b: b.add_chunk(table, np.asarray(ids[:30], np.int32), 0, keep_last=True),
        lambda b: b.add_tree(table, tree, 30),
    ):
        builder = BatchBuilder(runner.cache)
        build(builder)
        logits: RawLogits = runner.forward(builder.build()[0])
        found.append(whole(logits))
    return torch.cat(found)


def same_as_one(one: ModelRunner, many: ParallelRunner) -> None:
    """Logits within rounding; texts to the token, with drafts and without; log-probabilities within rounding."""
    texts, told, _ = drive(one)
    parted, parted_told, _ = drive(many)
    drafted, drafted_told, num_accepted = drive(many, Branches(texts))

    torch.testing.assert_close(rows(many), rows(one), rtol=0, atol=ATOL)
    assert parted == texts and drafted == texts
    assert num_accepted > 40
    assert np.allclose(numbers(parted_told), numbers(told), atol=1e-4)
    assert np.allclose(numbers(drafted_told), numbers(told), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_say_what_one_says(make_runner: Plain, make_parallel: Parallel, family: str) -> None:
    """Each rank holds half of the heads and token ids; filters, penalties, noise and the verdict are those of one."""
    many = make_parallel(family)

    assert many.cache.heads.num == 1 and many.widths == [108, 103]
    same_as_one(make_runner(family), many)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_oss"])
def test_four_ranks_share_two_kv_heads(make_runner: Plain, make_parallel: Parallel, family: str) -> None:
    """Neighbours have the same KV head each; sums over four ranks are added in their order."""
    many = make_parallel(family, 4)

    assert many.cache.heads.num == 1 and len(many.widths) == 4
    same_as_one(make_runner(family), many)


def test_a_rows_bits_do_not_depend_on_the_batch(make_parallel: Parallel) -> None:
    """On several ranks too: alone, and among others."""
    many = make_parallel("llama")
    ids, others = np.asarray(REQUESTS[1].prompt_ids, np.int32), np.asarray(REQUESTS[3].prompt_ids, np.int32)

    def last(*chunks: tuple[list[int], np.ndarray]) -> torch.Tensor:
        builder = BatchBuilder(many.cache)
        for table, part in chunks:
            builder.add_chunk(table, part, 0, keep_last=True)
        return whole(many.forward(builder.build()[0]))[0]

    mine, theirs = list(range(10)), list(range(20, 30))
    alone = last((mine, ids))

    assert torch.equal(last((mine, ids), (theirs, others)), alone)
    assert torch.equal(last((mine, ids), (theirs, others[:1])), alone)


def test_seeds_matter_and_texts_repeat(make_parallel: Parallel) -> None:
    """Negative control: another seed says something else; a runner that served others says the same again."""
    many = make_parallel("llama")
    engine = Engine(many, token_budget=32, max_streams=4)
    one = REQUESTS[1]
    other = msgspec.structs.replace(one, id="other", sampling=Sampling(8))

    first = engine.run([one, other])
    again = engine.run([one])

    assert first["plain"] == again["plain"] != first["other"]


def test_what_is_captured_is_what_one_rank_captures(make_runner: Plain, make_parallel: Parallel) -> None:
    """Whole raw rows of the accepted path, and only those, come to the leader."""
    one, many = make_runner("llama"), make_parallel("llama")
    texts = drive(one)[0]
    kept = [msgspec.structs.replace(request, capture=True) for request in REQUESTS]
    kept_rows = []
    for runner in (one, many):
        writer = ShardWriter(MemoryFileSystem(), "/nowhere", "decode-1")
        recorder = Recorder(CaptureConfig(), writer, target_version="1", vocab_size=VOCAB, metrics=Metrics())
        engine = Engine(runner, token_budget=32, max_streams=4, drafter=Branches(texts), capture=recorder)
        assert engine.run(kept) == texts
        steps = [job for job in recorder._jobs if isinstance(job, _Taken)]
        kept_rows.append(
            [
                np.concatenate([getattr(job, name) for job in steps])
                for name in ("ids", "log_probs", "log_sums")
            ]
        )

    (ids, log_probs, log_sums), (ids_2, log_probs_2, log_sums_2) = kept_rows
    assert len(ids) == len(ids_2) == LENGTH * len(REQUESTS)
    assert (ids[:, 0] == ids_2[:, 0]).all()
    assert np.allclose(log_probs, log_probs_2, atol=1e-2) and np.allclose(log_sums, log_sums_2, atol=ATOL)
