"""Drivers, tiny models and other engines where they are built -> the same tokens as ours, and failures that say why."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from bundled import TARGET
from paceline.cluster.config import ModelConfig, model_folder
from paceline.cluster.errors import ConfigError
from paceline.cluster.types import Request, Sampling
from paceline.deploy.bench import inprocess, report
from paceline.deploy.bench.check import Judge
from paceline.deploy.bench.figures import Figure
from paceline.deploy.bench.peers import (
    drive_llamacpp,
    drive_transformers,
    drive_vllm,
    environments,
    gguf_file,
    process,
)
from paceline.deploy.bench.peers.compare import Agreement, first_difference
from paceline.deploy.bench.peers.contest import Contest, Ours, Size
from paceline.deploy.bench.peers.process import Opening, PeerFailed, PeerProcess
from paceline.deploy.bench.workload import Workload

DRAFT = model_folder(ModelConfig().draft)
FOLDER = Path(process.__file__).parent
DRIVERS = {"transformers": drive_transformers, "vllm": drive_vllm, "llamacpp": drive_llamacpp}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on two threads than on one."""
    with inprocess.threads(1):
        yield


def save_model(folder: Path, *, level: bool = False) -> Path:
    """A tiny Llama; `level`: all its tokens are equally likely, always."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.15,
        rope_theta=5000.0,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    if level:
        torch.nn.init.zeros_(model.lm_head.weight)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("peer-model"))


def requests(num: int, num_tokens: int) -> list[Request]:
    """Greedy, of different lengths."""
    return [
        Request(f"r{i}", tuple(range(10 + i, 30 + 3 * i)), Sampling(i, 0.0), num_tokens) for i in range(num)
    ]


def ours(folder: Path, asked: list[Request]) -> list[list[int]]:
    """What our engine says."""
    engine = inprocess.new_engine(inprocess.load(folder), None, len(asked))
    outputs = inprocess.generate(engine, asked, len(asked)).outputs
    return [outputs[request.id] for request in asked]


def opening(folder: Path, work: Path, settings: dict[str, Any], draft: Path | None = None) -> Opening:
    return Opening(str(folder), str(draft) if draft else None, str(work), 3, 256, settings)


# --- drivers and their process ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host", "gguf_file", *(f"drive_{name}" for name in DRIVERS)])
def test_what_runs_in_a_peers_python_needs_nothing_of_ours(name: str) -> None:
    """The standard library when it is loaded (numpy to write GGUF); Paceline never, not even inside a function."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())

    def named(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        return [node.module or ""] if isinstance(node, ast.ImportFrom) else []

    at_once = {top.split(".")[0] for node in tree.body for top in named(node)}
    anywhere = {top.split(".")[0] for node in ast.walk(tree) for top in named(node)}

    assert at_once - sys.stdlib_module_names <= ({"numpy"} if name == "gguf_file" else set())
    assert "paceline" not in anywhere


SCRIPTED = """
import os, subprocess, sys, time
def environment(settings):
    return settings.get("variables", {})
class Driver:
    text, packages = "scripted", ()
    def __init__(self, target, draft, work, max_streams, max_len, settings):
        print("a library prints as it likes")
        self.settings = settings
        if settings.get("refuse"):
            raise NotImplementedError("no such kind of model")
    def run(self, prompts, num_tokens, streams):
        print("and again")
        match self.settings.get("do"):
            case "die":
                os._exit(3)
            case "hang":
                time.sleep(60)
            case "start":
                subprocess.Popen(["sleep", "600"])
            case "complain":
                raise ValueError(f"{streams} streams are too many")
        return [[len(prompt), *map(int, os.environ.get("ANSWER", "0 0").split())] for prompt in prompts]
"""


def scripted(tmp_path: Path, **settings: Any) -> PeerProcess:
    """A driver that does as the settings say."""
    driver = tmp_path / "drive_scripted.py"
    driver.write_text(SCRIPTED)
    return PeerProcess(Path(sys.executable), driver, opening(tmp_path, tmp_path, settings))


def test_a_driver_answers_in_json_whatever_its_libraries_print(tmp_path: Path) -> None:
    """Blocks one after the other; seconds are the driver's own; its process began with the variables it asked for."""
    with scripted(tmp_path, variables={"ANSWER": "7 9"}) as peer:
        first = peer.run([[1, 2], [3]], 3, 2)
        second = peer.run([[1]], 3, 1)

        assert peer.cpu_seconds() > 0 and peer.text == "scripted"
    assert first[0] == [[2, 7, 9], [1, 7, 9]] and second[0] == [[1, 7, 9]]
    assert 0 <= second[1] < 5
    assert peer.cpu_seconds() == 0


def test_our_threads_settings_are_not_a_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")

    handed_on = process.environment()

    assert "OMP_WAIT_POLICY" not in handed_on and "GOMP_SPINCOUNT" not in handed_on
    assert "PATH" in handed_on


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"refuse": True}, "no such kind of model"),
        ({"do": "die"}, "status 3"),
        ({"do": "complain"}, "2 streams are too many"),
        ({"do": "hang"}, "no answer in 1 s"),
    ],
    ids=["refuses", "dies", "complains", "hangs"],
)
def test_a_peer_that_cannot_says_why(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it opens or in a block; nothing hangs, nothing is left."""
    monkeypatch.setattr(process, "RUN_S", 1.0)

    with pytest.raises(PeerFailed, match=f"scripted: .*{message}"), scripted(tmp_path, **settings) as peer:
        peer.run([[1, 2], [3]], 3, 2)


ORPHAN = """
import os, signal, sys
import psutil
from pathlib import Path
from paceline.deploy.bench.peers.process import Opening, PeerProcess
folder, driver = sys.argv[1:]
peer = PeerProcess(Path(sys.executable), Path(driver), Opening(folder, None, folder, 1, 8, {"do": "start"}))
peer.run([[1]], 1, 1)
with peer.stopped():
    print(peer._process.pid, *(child.pid for child in psutil.Process(peer._process.pid).children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_peer_does_not_outlive_a_killed_bench_even_while_it_is_stopped(tmp_path: Path) -> None:
    """A stopped process reads no end of its pipe, and what it started has lost nobody: others have to end them."""
    driver = tmp_path / "drive_scripted.py"
    driver.write_text(SCRIPTED)
    command = [sys.executable, "-c", ORPHAN, str(tmp_path), str(driver)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    pids = [int(word) for word in killed.stdout.split()]

    assert killed.returncode == -signal.SIGKILL and len(pids) == 2
    end = time.monotonic() + 10
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
        assert time.monotonic() < end, f"of {pids} some are still there"
        time.sleep(0.02)


def test_a_python_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="does not start"):
        PeerProcess(tmp_path / "nowhere", FOLDER / "drive_vllm.py", opening(tmp_path, tmp_path, {}))


# --- which peers ------------------------------------------------------------------------------------------


def test_peers_are_found_by_name_by_path_or_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only finished environments; transformers is in our own Python; a path wins, and the order is always the same."""
    monkeypatch.setenv(environments.FOLDER, str(tmp_path))
    own = Path(sys.executable)
    assert environments.find(["all"]) == {"transformers": own}

    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    with pytest.raises(ConfigError, match="make peers"):
        environments.find(["vllm"])
    (tmp_path / "vllm" / ".built").touch()

    python = tmp_path / "vllm" / "bin" / "python"
    assert environments.find(["all"]) == {"transformers": own, "vllm": python}
    assert list(environments.find([f"llamacpp={own}", "vllm"]).items()) == [
        ("vllm", python),
        ("llamacpp", own),
    ]


@pytest.mark.parametrize("option", ["sglang", "vllm=", "vllm=/nowhere/python", "all=/usr/bin/env"])
def test_a_peer_that_is_none_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=option.split("=")[0]):
        environments.find([option])


def test_a_failed_step_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler; or pip's own last line, the log, and the usual causes. No half-made environment counts as one."""
    monkeypatch.setenv(environments.FOLDER, str(tmp_path))
    recipe = environments.Recipe(steps=(("--no-index", "surely-not-there"),), check="")
    monkeypatch.setitem(environments.RECIPES, "vllm", recipe)
    needy = environments.Recipe(steps=(), check="", needs={"no-such-compiler": "apt install it"})
    monkeypatch.setitem(environments.RECIPES, "llamacpp", needy)

    with pytest.raises(SystemExit, match="(?s)surely-not-there.*TORCH_INDEX.*apt install it"):
        environments.main([])
    assert environments.built("vllm") is None


# --- GGUF -------------------------------------------------------------------------------------------------


def test_safetensors_are_read_bit_for_bit(folder: Path) -> None:
    """bfloat16 to float32 loses nothing; names and shapes are all there."""
    expected = load_file(folder / "model.safetensors")
    found = dict(gguf_file.tensors(folder))

    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], tensor.float().numpy()) for name, tensor in expected.items())
    assert len({gguf_file.gguf_name(name) for name in found}) == len(found)
    assert gguf_file.gguf_name("model.layers.3.mlp.up_proj.weight") == "blk.3.ffn_up.weight"


def test_interleaved_rows_rotate_by_neighbours_as_halves_did() -> None:
    """The attention score of two rotated heads is the same in either convention; without reordering it is not."""
    rng = np.random.default_rng(0)
    heads, dim, width = 2, 8, 5
    weights = [rng.normal(size=(heads * dim, width)) for _ in range(2)]
    inputs = [rng.normal(size=width) for _ in range(2)]
    angles = np.outer([3, 11], 100.0 ** (-np.arange(dim // 2) / (dim // 2)))

    def halves(x: Any, angle: Any) -> Any:
        a, b = x[: dim // 2], x[dim // 2 :]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    def neighbours(x: Any, angle: Any) -> Any:
        turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * angle)
        return np.stack([turned.real, turned.imag], 1).ravel()

    def score(rotate: Any, rows: list[Any]) -> Any:
        q, k = (
            np.array([rotate(head, angle) for head in (w @ x).reshape(heads, dim)])
            for w, x, angle in zip(rows, inputs, angles, strict=True)
        )
        return (q * k).sum(1)

    reordered = [gguf_file.interleaved(w, heads) for w in weights]
    assert np.allclose(score(neighbours, reordered), score(halves, weights))
    assert not np.allclose(score(neighbours, weights), score(halves, weights))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "family"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rotation"),
        ({"attention_bias": True}, "biases"),
    ],
    ids=["family", "rotation", "biases"],
)
def test_what_gguf_is_not_written_for_is_refused(change: dict[str, Any], message: str) -> None:
    config = json.loads((TARGET / "config.json").read_text())
    gguf_file.check(config)

    with pytest.raises(ValueError, match=message):
        gguf_file.check({**config, **change})


# --- texts ------------------------------------------------------------------------------------------------


def test_a_first_difference_counts_by_how_far_apart_the_tokens_are(folder: Path, tmp_path: Path) -> None:
    """The same; a near-tie where all tokens are equally likely; different where the model is sure; too short."""
    request = requests(1, 4)[0]
    right = ours(folder, [request])[0]
    wrong = [*right[:2], (right[2] + 1) % 4096, right[3]]
    found, level = Agreement(), Agreement()

    for other in (right, wrong, right[:3]):
        found.compare(Judge(folder), request, right, other)
    level.compare(Judge(save_model(tmp_path, level=True)), request, right, wrong)

    assert (found.num_requests, found.num_same, found.num_near_ties) == (3, 1, 0)
    assert [line.split(":")[1].split(",")[0].strip() for line in found.different] == [
        "token 2",
        "3 tokens for 4",
    ]
    assert (level.num_near_ties, level.different) == (1, [])
    assert first_difference([1, 2, 3], [1, 2]) == 2


# --- contests ---------------------------------------------------------------------------------------------


def contest(tmp_path: Path, scenario: str, settings: dict[str, Any]) -> Contest:
    """The bundled pair, one pair of blocks of one short request, against the scripted driver."""
    side = Ours(
        scenario=scenario,
        target=TARGET,
        draft=DRAFT,
        runner=inprocess.load(TARGET),
        make_drafter=inprocess.drafters(DRAFT),
        num_threads=1,
        workload=Workload(TARGET),
        judge=Judge(TARGET),
    )
    made = Contest("vllm", Path(sys.executable), side, Size((1,), 1, 0.01, 3), tmp_path, lambda text: None)
    driver = tmp_path / "drive_scripted.py"
    driver.write_text(SCRIPTED)
    made._driver = type(
        "Scripted",
        (),
        {
            "__file__": str(driver),
            "plain": lambda threads: [{"name": "plain", "threads": 1}],
            "speculative": lambda best: [{**best, "name": "drafts", **settings}],
        },
    )
    return made


def test_a_peer_whose_drafts_cannot_be_run_has_no_figure_for_them(tmp_path: Path) -> None:
    """Named with its own words; its plain decoding takes nobody's place. A text of its own is a complaint, not a near-tie."""
    outcome = contest(tmp_path, "domains", {"refuse": True}).measure()

    assert [row.figure for row in outcome.rows] == ["peer.vllm.off.1"]
    assert [line for line in outcome.not_run if "peer.vllm.best.1" in line and "no such kind" in line]
    assert any("drafts: not run" in trial for trial in outcome.trials)
    row = outcome.rows[0]
    assert row.num_same == 0 and len(row.different) == row.num_requests - row.num_near_ties > 0


def test_a_peers_best_may_be_to_do_without_its_drafts(tmp_path: Path) -> None:
    """Both sides at their best: the scripted drafts gain nothing, and either way the figure is there, by its scenario."""
    outcome = contest(tmp_path, "copy", {}).measure()

    assert [row.figure for row in outcome.rows] == ["peer.vllm.off.copy.1", "peer.vllm.best.copy.1"]
    assert [row.ours for row in outcome.rows] == ["without drafts", "with drafts"]
    assert outcome.not_run == []


def test_floors_of_peers() -> None:
    """As they are asked for, on either model."""
    found = report.Report({}, False, 3, {})
    floors = {
        "peer.vllm.off.4": 1.5,
        "peer.vllm.off.random.16": 1.5,
        "peer.hf.off.1": 1.5,
        "peer.llamacpp.off.1": 0.8,
        "peer.llamacpp.off.random.1": 0.8,
        "peer.llamacpp.off.16": 1.0,
        "peer.vllm.best.1": 2.0,
        "peer.llamacpp.best.1": 1.2,
    }
    found.figures = {name: Figure.exactly(floor - 0.02) for name, floor in floors.items()}
    assert {found.verdicts()[name] for name in floors} == {"fail"}
    found.figures = {name: Figure.exactly(floor) for name, floor in floors.items()}
    assert {found.verdicts()[name] for name in floors} == {"pass"}


# --- the real ones ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DRIVERS)
def test_a_peer_gives_our_tokens_alone_in_a_batch_and_with_drafts(name: str, tmp_path: Path) -> None:
    """The bundled pair, greedy, float32: prompts of several lengths, a wave that is not full, its first way to speculate."""
    python = environments.built(name)
    if python is None:
        pytest.skip(f"no environment of {name}: `make peers` builds it")
    asked = Workload(TARGET).requests("domains", 0, 5, max_tokens=12, greedy=True, stops=False)
    prompts, expected = [list(request.prompt_ids) for request in asked], ours(TARGET, asked)
    driver = DRIVERS[name]
    plain = driver.plain([1])[0]
    file = Path(driver.__file__)

    with PeerProcess(python, file, opening(TARGET, tmp_path, plain)) as peer:
        assert peer.run(prompts, 12, 3)[0] == expected
        assert peer.run(prompts[:2], 12, 1)[0] == expected[:2]
    with PeerProcess(python, file, opening(TARGET, tmp_path, driver.speculative(plain)[0], DRAFT)) as peer:
        assert peer.run(prompts, 12, 1)[0] == expected


@pytest.mark.parametrize(
    ("info", "widest"),
    [
        ("CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1 | AMX_INT8 = 1 | OPENMP = 1 | ", "AMX_INT8"),
        ("CPU : AVX = 1 | AVX2 = 1 | AVX512 = 0 | ", "AVX"),
        ("Metal : EMBED_LIBRARY = 1 | CPU : NEON = 1 | ARM_FMA = 1 | ", "NEON"),
        ("", "no vector instructions"),
    ],
)  # fmt: skip
def test_a_table_names_the_widest_instructions_of_a_build(info: str, widest: str) -> None:
    """One word for its column, not the whole list."""
    assert drive_llamacpp._widest(info) == widest
