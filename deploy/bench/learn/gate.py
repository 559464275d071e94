"""Drafts that are better, worse or neither, and fresh texts -> how often the gate lets each kind through.

The truth about a candidate is its saving on texts that neither the gate nor any training has seen, thousands of them;
by that it is counted, whatever it was meant to be. Each candidate stands before the gate once, with held-out texts
drawn anew for every few of them, which share the noise. Texts are the real target's, made once and kept in a folder with
everything else: a run that was broken off goes on where it was.

    python -m paceline.deploy.bench.learn.gate --work DIR            # all of it: hours on two cores
    python -m paceline.deploy.bench.learn.gate --work DIR --fresh 800 --null 20 --heldout 600 --each 400
    python -m paceline.deploy.bench.learn.gate --work DIR --share 1/2    # half of the trials, beside a process for 2/2
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoTokenizer

from paceline.cluster.config import DraftConfig, ModelConfig, SpeculationConfig, model_folder
from paceline.cluster.learning.config import GateConfig
from paceline.cluster.learning.counterfactual import Costs, Policy, Scores
from paceline.cluster.learning.gate import GateReport, Interval, charged, decide, saving_of
from paceline.cluster.types import Request, Sampling
from paceline.deploy.bench.learn.candidates import Workshop
from paceline.deploy.bench.workload import chat
from paceline.deploy.models import tasks
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters.colocated import ColocatedDrafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner, load_runner
from paceline.workers.profile import measure_step_cost
from paceline.workers.replay import Text, replay_policy
from paceline.workers.scoring import (
    confirm_on,
    load_draft,
    measure_draft_cost,
    measure_slowdown,
    score_requests,
)

Say = Callable[[str], None]

DOMAINS = (*tasks.DOMAINS, tasks.EDITS)
PARTS = {"fresh": 11, "heldout": 12, "train": 13, "tune": 14}
"""Kinds of texts, and the seeds of their requests."""
CHAMPION = "champion"
_CHUNK = 200
"""Texts of one file: what is lost when a run is broken off."""
_STREAMS = 16
_MAX_TOKENS = 160
_TEMPERATURE = 0.8
_BAD, _GOOD, _NULL = -0.01, 0.03, 0.01
"""By its true saving a candidate is worse, better, or of no worth (less than this, either way)."""
_HALVINGS = 6
_CONFIRM = 100
"""Texts on which a candidate that passed is replayed through the deployed code, as the gate does it."""
_AT_ONCE = 6
"""Candidates that are scored beside each other: they share the noise."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of it."""

    fresh: int = 5000
    """Texts for the truth."""
    heldout: int = 2000
    each: int = 1000
    """Of those held out, for one candidate."""
    train: int = 1500
    tune: int = 200
    """Texts on which the strength of a damage is found."""
    steps: int = 240
    """Of training."""
    null: int = 100
    live: int = 100
    """Requests that the engine runs live, for the error of the prediction."""


@dataclass(slots=True)
class Trial:
    """One candidate before the gate."""

    name: str
    kind: str
    truth: Interval
    slowdown: float
    report: GateReport

    @property
    def verdict(self) -> str:
        """What it is, by its truth."""
        if self.truth.mean <= _BAD:
            return "bad"
        if self.truth.mean >= _GOOD:
            return "good"
        return "null" if abs(self.truth.mean) < _NULL else "between"

    def encode(self) -> bytes:
        """A line of JSON."""
        return msgspec.json.encode(
            {
                "name": self.name,
                "kind": self.kind,
                "truth": self.truth,
                "slowdown": self.slowdown,
                "report": self.report,
            }
        )

    @classmethod
    def decode(cls, line: bytes) -> Trial:
        """Inverse of `encode`."""
        found = msgspec.json.decode(line)
        return cls(
            found["name"],
            found["kind"],
            msgspec.convert(found["truth"], Interval),
            found["slowdown"],
            msgspec.convert(found["report"], GateReport),
        )


@dataclass(slots=True)
class Curve:
    """The operating curve: counts by what candidates truly are."""

    trials: list[Trial]
    errors: dict[str, float]
    size: Size
    notes: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """By name, as in the JSON line of the benchmark."""
        found: dict[str, float] = {}
        for verdict in ("bad", "good", "null", "between"):
            mine = [trial for trial in self.trials if trial.verdict == verdict]
            found[f"gate.{verdict}_deployed"] = sum(trial.report.passed for trial in mine)
            found[f"gate.{verdict}_tried"] = len(mine)
        inside = [t for t in self.trials if t.report.saving.lo <= t.truth.mean <= t.report.saving.hi]
        found["gate.interval_coverage"] = len(inside) / max(1, len(self.trials))
        return found | self.errors

    def lines(self) -> list[str]:
        """For a terminal: one for each candidate, and the counts."""
        rows = [
            f"{t.name:16} {t.kind:10} {t.verdict:8} truth {t.truth.mean:+7.2%}  gate {t.report.saving.mean:+7.2%} "
            f"[{t.report.saving.lo:+.2%}, {t.report.saving.hi:+.2%}]  {'PASSED' if t.report.passed else 'refused'}: "
            f"{t.report.reason}"
            for t in sorted(self.trials, key=lambda trial: trial.truth.mean)
        ]
        return [*rows, *(f"{name} = {value:.4g}" for name, value in self.figures().items()), *self.notes]


class GateBench:
    """All of it, step by step; each keeps what it made in the work folder."""

    def __init__(self, work: Path, size: Size, say: Say, share: tuple[int, int] = (1, 1)) -> None:
        """`share`: (i, n): of the trials, the i-th of n parts; other processes take the others, when drafts are made."""
        self._work, self._size, self._say, self._share = work, size, say, share
        work.mkdir(parents=True, exist_ok=True)
        self._target_folder = model_folder(ModelConfig().target)
        self._draft_folder = model_folder(ModelConfig().draft)
        self._shop = Workshop(work, self._target_folder, self._draft_folder, say)
        # Alone, a stream gains most from its draft, and a draft that is a little worse costs most.
        self._policy = Policy.of(SpeculationConfig(), streams=1)
        self._runner: ModelRunner | None = None
        self._tuned: Scores | None = None
        """The champion on the texts for tuning."""

    def run(self) -> Curve:
        """Texts, champion, candidates, truth, gate, and the error of the prediction."""
        texts = {part: self._texts(part, getattr(self._size, part)) for part in PARTS}
        self._train(texts["train"])
        costs = self._costs()
        errors = self._errors(texts["heldout"][: self._size.live], costs)
        for name, value in errors.items():
            self._say(f"{name} = {value:.4g}")
        candidates = self._candidates(texts["tune"], costs)
        trials = self._trials(candidates, texts["heldout"], texts["fresh"], costs)
        return Curve(trials, errors, self._size)

    # -- texts ---------------------------------------------------------------------------------------------

    def _target(self) -> ModelRunner:
        if self._runner is None:
            self._runner = load_runner(self._target_folder, kv_memory_mb=96, block_size=16)[0]
        return self._runner

    def _texts(self, part: str, num: int) -> list[Text]:
        """The first `num` of a part, made if they are not there."""
        found: list[Text] = []
        for first in range(0, num, _CHUNK):
            path = self._work / "texts" / f"{part}-{first:06}.msgpack"
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                began = time.monotonic()
                made = generate(self._target(), self._requests(part, first, _CHUNK), _STREAMS)
                partial = path.with_suffix(".partial")
                partial.write_bytes(msgspec.msgpack.encode([(t.request, t.output) for t in made]))
                partial.rename(path)
                num_tokens = sum(len(text.output) for text in made)
                rate = num_tokens / (time.monotonic() - began)
                self._say(f"texts {part}: {first + len(made)} of {num}, {rate:.0f} tokens/s")
            stored = msgspec.msgpack.decode(path.read_bytes(), type=list[tuple[Request, tuple[int, ...]]])
            found.extend(Text(request, output) for request, output in stored)
        return found[:num]

    def _requests(self, part: str, first: int, num: int) -> list[Request]:
        tokenizer: Any = AutoTokenizer.from_pretrained(self._target_folder)
        stops = (tokenizer.eos_token_id, tokenizer.vocab["<|end|>"])
        return [request_of(tokenizer, part, index, stops) for index in range(first, first + num)]

    # -- drafts --------------------------------------------------------------------------------------------

    def _train(self, texts: Sequence[Text]) -> None:
        """The champion half way, better ones behind it, and one that forgets the domains it is not shown any more."""
        steps = self._size.steps
        self._shop.train("later", "", texts, steps=steps, snapshots={steps // 3: CHAMPION}, seed=1)
        for domain in ("functions", "sql"):
            # Of that domain alone: what is learnt of the others beside it would make up for the loss.
            damaged = [
                Text(text.request, tuple(reversed(text.output)))
                for text in texts
                if text.request.domain == domain
            ]
            self._shop.train(f"forgot-{domain}", CHAMPION, damaged, steps=steps // 6, snapshots={}, seed=2)

    def _costs(self) -> Costs:
        """Step times of this machine, measured once."""
        path = self._work / "costs.json"
        if not path.exists():
            table = measure_step_cost(self._target())
            rows, seconds = measure_draft_cost(load_draft(self._shop.folder(CHAMPION)))
            costs = Costs(tuple(table.rows.tolist()), tuple(table.seconds.tolist()), rows, seconds, 30e-6)
            path.write_bytes(msgspec.json.encode(costs))
        return msgspec.json.decode(path.read_bytes(), type=Costs)

    def _candidates(self, tune: Sequence[Text], costs: Costs) -> list[tuple[str, str]]:
        """(name, kind) of all candidates, their folders made."""
        made: list[tuple[str, str]] = []
        shop = self._shop
        for index in range(20):
            share = 0.3 + 0.7 * (index + 1) / 20
            shop.mix(f"better-{index:02}", CHAMPION, "later", share)
            made.append((f"better-{index:02}", "better"))

        def at_loss(kind: str, index: int, make: Callable[[str, float], Path], most: float) -> None:
            name = f"{kind}-{index:02}"
            if not shop.has(name):
                wanted = 0.015 + 0.03 * index / 4
                strength = self._strength(
                    lambda s: make(f"tuning-{kind}-{s:.4f}", s), wanted, most, tune, costs
                )
                self._say(f"{name}: strength {strength:.4f} for a loss of about {wanted:.1%}")
                make(name, strength)
            made.append((name, kind))

        for index in range(5):
            at_loss("older", index, lambda n, s: shop.mix(n, CHAMPION, "", s), 0.4)
            at_loss("noise", index, lambda n, s: shop.noisy(n, CHAMPION, s, seed=7), 0.4)
        for index in range(4):
            domain = ("functions", "sql")[index % 2]
            at_loss(
                f"forgot-{domain}",
                index,
                lambda n, s, d=domain: shop.mix(n, CHAMPION, f"forgot-{d}", s),  # type: ignore[misc]
                1.0,
            )
        for index, width in enumerate((480, 512, 576)):
            shop.wider(f"slower-{index}", CHAMPION, width)
            made.append((f"slower-{index}", "slower"))
        for index, scale in enumerate((0.5, 1.0, 3.0)):
            shop.noisy(f"gross-{index}", CHAMPION, scale, seed=index)
            made.append((f"gross-{index}", "gross"))
        for index in range(self._size.null):
            shop.noisy(f"null-{index:03}", CHAMPION, 0.01, seed=100 + index)
            made.append((f"null-{index:03}", "null"))
        return made

    def _strength(
        self,
        make: Callable[[float], Path],
        loss: float,
        most: float,
        tune: Sequence[Text],
        costs: Costs,
    ) -> float:
        """The strength of a damage that costs about so much, by halving."""
        if self._tuned is None:
            (self._tuned,) = self._score(tune, [self._scorer(CHAMPION)], [costs])
        low, high = 0.0, most
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            (other,) = self._score(tune, [self._scorer(make(middle).name)], [costs])
            if 1 - other.seconds.sum() / self._tuned.seconds.sum() > -loss:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _score(
        self, texts: Sequence[Text], runners: Sequence[ModelRunner], costs: Sequence[Costs]
    ) -> list[Scores]:
        return score_requests(texts, runners, policy=self._policy, costs=costs)

    def _scorer(self, name: str) -> ModelRunner:
        """A draft as the gate loads it to score texts."""
        return load_draft(self._shop.folder(name), many_rows=True)

    # -- truth and gate ------------------------------------------------------------------------------------

    def _trials(
        self,
        candidates: Sequence[tuple[str, str]],
        heldout: Sequence[Text],
        fresh: Sequence[Text],
        costs: Costs,
    ) -> list[Trial]:
        """Those of earlier runs of this size, and the others."""
        path = self._work / f"trials-{self._size.fresh}-{self._size.heldout}-{self._size.each}.jsonl"
        done = _read_trials(path)
        # In no order of kinds: a run that is broken off has some of each.
        shuffled = sorted(candidates, key=lambda one: zlib.crc32(one[0].encode()))
        part, num_parts = self._share
        waiting = deque(one for one in shuffled[part - 1 :: num_parts] if one[0] not in done)
        if waiting:
            champion = load_draft(self._shop.folder(CHAMPION))
            base_scorer = self._scorer(CHAMPION)
            (base_fresh,) = self._score(fresh, [base_scorer], [costs])
        while waiting:
            batch = [waiting.popleft() for _ in range(min(_AT_ONCE, len(waiting)))]
            began = time.monotonic()
            runners = [load_draft(self._shop.folder(name)) for name, _ in batch]
            scorers = [self._scorer(name) for name, _ in batch]
            slowdowns = [measure_slowdown(champion, runner) for runner in runners]
            # The truth about a wider model is the same measurement, longer: its function is the champion's.
            true_ones = [
                measure_slowdown(champion, runner, pairs=200).mean if kind == "slower" else 1.0
                for runner, (_, kind) in zip(runners, batch, strict=True)
            ]
            as_charged = [costs.slower_draft(charged(slowdown)) for slowdown in slowdowns]
            as_true = [costs.slower_draft(factor) for factor in true_ones]
            drawn = self._drawn(heldout, batch[0][0])
            base_held, *held = self._score(drawn, [base_scorer, *scorers], [costs, *as_charged])
            true = self._score(fresh, scorers, as_true)
            for at, (name, kind) in enumerate(batch):
                report = decide(
                    base_held,
                    held[at],
                    GateConfig(),
                    at=0.0,
                    policy=self._policy,
                    slowdown=slowdowns[at],
                )
                if report.passed:
                    report = confirm_on(
                        drawn[-_CONFIRM:],
                        report,
                        [champion, runners[at]],
                        policy=self._policy,
                        costs=[costs, as_charged[at]],
                    )
                truth, _ = saving_of(base_fresh.seconds, true[at].seconds, seed=1)
                done[name] = Trial(name, kind, truth, true_ones[at], report)
                with path.open("ab") as file:
                    file.write(done[name].encode() + b"\n")
            minutes = (time.monotonic() - began) * len(waiting) / len(batch) / 60
            num_done = len(_read_trials(path))
            self._say(f"gate: {num_done} of {len(candidates)} candidates, {minutes:.0f} minutes left")
        done = _read_trials(path)
        return [done[name] for name, _ in candidates if name in done]

    def _drawn(self, heldout: Sequence[Text], name: str) -> list[Text]:
        """Texts for the gate, those that begin with this candidate: drawn by its name, so that a resumed run agrees."""
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        picked = np.sort(rng.choice(len(heldout), min(self._size.each, len(heldout)), replace=False))
        return [heldout[row] for row in picked.tolist()]

    # -- the error of the prediction ---------------------------------------------------------------------

    def _errors(self, texts: Sequence[Text], costs: Costs) -> dict[str, float]:
        """Steps: one forward against the engine live, always asking the draft; and the deployed policy, by three ways.

        gate.prediction_error: the gate's form against a live run under the same policy, the draft asked in every step.
            Where a prompt takes the rows of a step, drafts are cut; the gate's form knows nothing of neighbours.
        gate.saving_by_deployed_code, gate.saving_by_gate: of a better draft, by replay with all sources, and by the gate.
        """
        path = self._work / f"errors-{len(texts)}.json"
        if path.exists():
            found: dict[str, float] = json.loads(path.read_text())
            return found
        requests = [text.request for text in texts]
        champion, later = (load_draft(self._shop.folder(name)) for name in (CHAMPION, "later"))
        always = msgspec.structs.replace(
            self._policy, control="fixed", sources=("draft",), streams=1, first_is_plain=True
        )
        live = self._live_steps(requests, champion)
        (fast,) = score_requests(texts, [self._scorer(CHAMPION)], policy=always, costs=[costs])
        both = [
            replay_policy(
                texts, runner, policy=self._policy, costs=costs, vocab_size=self._target().vocab_size
            )
            for runner in (champion, later)
        ]
        scores = self._score(texts, [self._scorer(CHAMPION), self._scorer("later")], [costs, costs])
        by_code = 1 - sum(t.seconds for t in both[1].texts) / sum(t.seconds for t in both[0].texts)
        by_gate = 1 - float(scores[1].seconds.sum() / scores[0].seconds.sum())
        errors = {
            "gate.prediction_error": abs(float(fast.steps.sum()) / sum(live.values()) - 1),
            "gate.requests_with_other_steps": float(
                sum(
                    live[key] != steps
                    for key, steps in zip(fast.request_ids, fast.steps.tolist(), strict=True)
                )
            ),
            "gate.saving_by_deployed_code": by_code,
            "gate.saving_by_gate": by_gate,
        }
        path.write_text(json.dumps(errors))
        return errors

    def _live_steps(self, requests: Sequence[Request], draft: ModelRunner) -> dict[str, int]:
        """Steps of each request in the real engine with the real target, the draft asked in every step."""
        target, shape = self._target(), self._policy
        drafter = ColocatedDrafter(
            DraftEngine(draft, token_budget=DraftConfig().token_budget, prefix_cache=False),
            vocab_size=target.vocab_size,
            depth=shape.depth,
            width=shape.width,
            floor=shape.floor,
        )
        engine = Engine(target, token_budget=256, max_streams=_STREAMS, drafter=drafter, prefix_cache=False)
        waiting, steps = deque(requests), {request.id: 0 for request in requests}
        while waiting or len(engine.scheduler):
            while waiting and len(engine.scheduler) < 4:
                engine.add(waiting.popleft())
            for emission in engine.step().emissions:
                steps[emission.stream.request.id] += bool(emission.tokens)
        return steps


def _read_trials(path: Path) -> dict[str, Trial]:
    """By name; of this process, of earlier ones, and of those beside it."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return {trial.name: trial for trial in map(Trial.decode, lines)}


def request_of(tokenizer: Any, part: str, index: int, stops: tuple[int, ...]) -> Request:
    """Request `index` of a part: the domains in turn; greedy and sampled ones of each."""
    domain = DOMAINS[index % len(DOMAINS)]
    item = next(tasks.items(domain, "new_words", PARTS[part] * 1_000_003 + index))
    temperature = 0.0 if index // len(DOMAINS) % 2 == 0 else _TEMPERATURE
    seed = zlib.crc32(f"{part}/{index}".encode())
    prompt = tuple(chat(tokenizer, item.request))
    return Request(
        f"{part}-{index}", prompt, Sampling(seed, temperature=temperature), _MAX_TOKENS, stops, domain=domain
    )


def generate(target: ModelRunner, requests: Sequence[Request], streams: int) -> list[Text]:
    """What the target answers."""
    engine = Engine(target, token_budget=256, max_streams=streams, prefix_cache=False)
    waiting, outputs = deque(requests), {request.id: list[int]() for request in requests}
    while waiting or len(engine.scheduler):
        while waiting and len(engine.scheduler) < streams:
            engine.add(waiting.popleft())
        for emission in engine.step().emissions:
            outputs[emission.stream.request.id].extend(emission.tokens)
    return [Text(request, tuple(outputs[request.id])) for request in requests]


def part_of(text: str) -> tuple[int, int]:
    """I/N as numbers.

    Raises:
        argparse.ArgumentTypeError: there is no such part.
    """
    part, slash, parts = text.partition("/")
    if not slash or not part.isdecimal() or not parts.isdecimal() or not 1 <= int(part) <= int(parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with 1 <= I <= N, as 1/2")
    return int(part), int(parts)


def main() -> None:
    """Run it, or what is left of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for texts, drafts and results")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--share", type=part_of, default=(1, 1), help="I/N: the I-th of N parts of the trials"
    )
    for name in Size.__slots__:
        parser.add_argument(f"--{name}", type=int, default=getattr(Size(), name))
    given = vars(parser.parse_args())
    torch.set_num_threads(given.pop("threads"))
    work, part = given.pop("work"), given.pop("share")
    curve = GateBench(work, Size(**given), lambda line: print(line, flush=True), part).run()
    print("\n".join(curve.lines()))
    print(json.dumps({"bench": "learn.gate", "figures": curve.figures()}))


if __name__ == "__main__":
    main()
