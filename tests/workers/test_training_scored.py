"""Requests that the engine captured and two versions on storage -> the gate's report, by a score order."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from bundled import TARGET
from draft_folders import publish_folder
from paceline.cluster.config import ClusterConfig, ModelConfig, load_config, model_folder
from paceline.cluster.learning.capture import ShardReader, ShardWriter
from paceline.cluster.learning.config import CaptureConfig
from paceline.cluster.learning.gate import GateReport
from paceline.cluster.learning.orders import OrderSettings
from paceline.cluster.metrics import Metrics
from paceline.cluster.model_files import weights_version
from paceline.cluster.types import DraftRef, TrainOrder
from paceline.deploy.bench.workload import Workload
from paceline.workers.capture import Recorder
from paceline.workers.engine import Engine
from paceline.workers.model_runner import load_runner
from paceline.workers.training.folder import RunFolder
from paceline.workers.training.pace import Pace
from paceline.workers.training.protocol import Progress, Start, decode_progress, encode
from paceline.workers.training.run import Run

DRAFT = model_folder(ModelConfig().draft)
BASE = DraftRef("", "")
STEPS = {"step_rows": (1, 8, 64), "step_seconds": (3e-3, 3.4e-3, 12e-3)}
"""The decode worker's, as control would say them."""
HOLDOUT = 0.6
NUM = 24
FILE = fsspec.filesystem("file")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards as the decode worker writes them: the bundled target's own texts, of two domains."""
    root = tmp_path_factory.mktemp("storage")
    runner = load_runner(TARGET, kv_memory_mb=48, block_size=16)[0]
    recorder = Recorder(
        CaptureConfig(holdout=HOLDOUT, top=8),
        ShardWriter(FILE, str(root), "decode-0"),
        target_version=runner.version,
        vocab_size=runner.vocab_size,
        metrics=Metrics(),
    )
    requests = [
        msgspec.structs.replace(
            request, capture=True, domain="known" if index % 2 else "other", tenant="acme"
        )
        for index, request in enumerate(Workload(TARGET).requests("domains", 0, NUM, max_tokens=16))
    ]
    engine = Engine(runner, token_budget=256, max_streams=8, capture=recorder)
    with torch.inference_mode():
        engine.run(requests)
    recorder.work(flush=True)
    return root


@pytest.fixture(scope="module")
def spoilt(storage: Path, tmp_path_factory: pytest.TempPathFactory) -> DraftRef:
    """The bundled draft with so much noise on its weights that it is of little use, published."""
    folder = tmp_path_factory.mktemp("spoilt")
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.5 * weight.std() * torch.randn_like(weight)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return publish_folder(folder, storage)


@pytest.fixture
def config(storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    """The bundled pair, a gate that few requests suffice for."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return load_config(
        None,
        [
            "learning.enabled=true", f"learning.storage={storage}", "learning.gate.min_requests=10",
            "learning.gate.max_slowdown=10", "speculation.control=fixed", "trainer.priority=normal",
        ],
    )  # fmt: skip


def score(config: ClusterConfig, tmp_path: Path, base: DraftRef, candidate: DraftRef | None, *, pace: Pace | None = None, **settings: object) -> Progress:  # fmt: skip
    """One score order in this process."""
    common = OrderSettings(**{**STEPS, **settings})  # type: ignore[arg-type]
    order = TrainOrder("run-1", "score", base, candidate, settings=common.encode())
    said: list[Progress] = []
    end = Run(config, order, RunFolder(tmp_path / "trainer", "run-1"), pace or Pace(), said.append).go()
    assert [p.state for p in said[:-1]] == ["scoring"]
    return end


def held_out(storage: Path) -> int:
    return len(list(ShardReader(FILE, str(storage)).requests(heldout=True)))


def test_a_worse_candidate_is_refused_on_what_was_held_out(config: ClusterConfig, storage: Path, spoilt: DraftRef, tmp_path: Path) -> None:  # fmt: skip
    """All held-out requests of the configured target and nothing else, with control's own step times."""
    end = score(config, tmp_path, BASE, spoilt, look=3, streams=2)
    assert end.state == "done", end.error
    report = GateReport.decode(end.report)

    assert 10 <= report.num_requests == held_out(storage) < NUM
    assert not report.passed
    assert (report.champion, report.version) == (weights_version(DRAFT), spoilt.version)
    assert report.candidate_tokens_per_step < report.champion_tokens_per_step
    assert report.saving.mean < 0
    assert {d.domain for d in report.domains} == {"known", "other"}
    assert (report.look, report.policy.streams, report.policy.control) == (3, 2, "fixed")
    assert report.costs is not None
    assert (report.costs.rows, report.costs.seconds) == (STEPS["step_rows"], STEPS["step_seconds"])


def test_a_score_order_that_names_nothing_has_failed_and_says_so(
    config: ClusterConfig, tmp_path: Path
) -> None:
    """So does one whose candidate is not on storage."""
    nothing = score(config, tmp_path, BASE, None)
    assert nothing.state == "failed"
    assert "candidate: expected a version" in nothing.error
    bad = score(config, tmp_path, BASE, BASE, gate={"min_saving": 7})
    assert bad.state == "failed"
    assert "min_saving" in bad.error
    gone = score(config, tmp_path, BASE, DraftRef("0123456789ab", f"file://{tmp_path}/drafts/0123456789ab"))
    assert gone.state == "failed"
    assert "0123456789ab" in gone.error


def test_the_pool_is_ranked(config: ClusterConfig, spoilt: DraftRef, tmp_path: Path) -> None:
    """The fastest first, whichever is live; the base is among them."""
    end = score(config, tmp_path, spoilt, None, rank=(BASE, spoilt))
    assert end.state == "done", end.error
    ranked = json.loads(end.report)["ranked"]

    assert [one["version"] for one in ranked] == [weights_version(DRAFT), spoilt.version]
    assert ranked[0]["saving"]["mean"] > 0 == ranked[1]["saving"]["mean"]


@pytest.mark.slow
def test_a_better_candidate_passes_in_the_training_process(config: ClusterConfig, storage: Path, spoilt: DraftRef, tmp_path: Path) -> None:  # fmt: skip
    """The process that the trainer starts; step times are measured there, and the answer is the same after a restart."""
    common = OrderSettings(gate={"min_requests": 10, "max_slowdown": 10.0})
    order = TrainOrder("run-1", "score", spoilt, BASE, settings=common.encode())
    strict = config.model_copy(
        update={"learning": config.learning.model_copy(update={"gate": type(config.learning.gate)()})}
    )
    said = in_process(strict, order, tmp_path)
    assert said[-1].state == "done", said[-1].error
    report = GateReport.decode(said[-1].report)

    assert report.passed, report.reason
    assert (report.champion, report.version) == (spoilt.version, weights_version(DRAFT))
    assert report.num_requests == held_out(storage)
    assert report.costs is not None and all(s > 0 for s in report.costs.seconds)
    assert in_process(strict, order, tmp_path)[-1] == said[-1]


def in_process(config: ClusterConfig, order: TrainOrder, tmp_path: Path) -> list[Progress]:
    """What the training process says from its start to its end."""
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-m", "paceline.workers.training.process", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    with ours, ours.makefile("rb") as lines:
        ours.sendall(
            encode(Start(config.model_dump_json(), order, "normal", str(tmp_path / "trainer"), False))
        )
        said = [decode_progress(line) for line in lines]
    assert child.wait(10) == 0
    return said
