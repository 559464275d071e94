"""`paceline profile` on a tiny random pair: every table is there, times grow with work, the link is really measured."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from bundled import TARGET
from paceline.cluster.config import ClusterConfig, load_config
from paceline.cluster.errors import ConfigError, ModelError, TransferError
from paceline.cluster.profile import LinkPoint, Profile
from paceline.deploy import cli
from paceline.deploy.bench.inprocess import threads
from paceline.deploy.profile import link, main
from paceline.deploy.profile.measure import PairBench, Plan, Spread, repeated

TINY = Plan(
    nodes=(1, 4, 64),
    contexts=(16, 512),
    streams=(1, 3),
    chunks=(16, 4096),
    prompt=256,
    link_bytes=(4096, 1 << 20),
    least_s=0.01,
    least_num=5,
    num_messages=9,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on two threads than on one."""
    with threads(1):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the bundled tokenizer; target and draft at once."""
    made = tmp_path_factory.mktemp("random")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / file, made / file)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=json.loads((TARGET / "config.json").read_text())["vocab_size"],
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=640,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    return made


def config_of(folder: Path, *settings: str) -> ClusterConfig:
    """The laptop preset with this pair."""
    return load_config("laptop", [f"model.target={folder}", f"model.draft={folder}", *settings])


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, str, Path]:
    """One whole run: the profile, what was printed, the file."""
    path = tmp_path_factory.mktemp("out") / "profile.json"
    text = io.StringIO()
    out, err = Console(file=text, width=160), Console(file=io.StringIO())
    profile = main.run(config_of(folder), path, plan=TINY, out=out, err=err)
    return profile, text.getvalue(), path


def test_every_point_of_the_plan_is_measured(measured: tuple[Profile, str, Path]) -> None:
    """Three streams and 512 tokens fit as well; chunks longer than the prompt are the prompt."""
    profile, _, _ = measured
    found = {(p.streams, p.nodes, p.context) for p in profile.steps}

    assert found == {(b, n, c) for b in (1, 3) for n in (1, 4, 64) for c in (16, 512)}
    assert [(p.chunk, p.tokens) for p in profile.prefill] == [(16, 256), (256, 256)]
    shape = ClusterConfig().speculation
    assert [(p.streams, p.depth, p.width) for p in profile.drafts] == [
        (streams, shape.depth, shape.width) for streams in (1, 3)
    ]
    assert [p.num_bytes for p in profile.link] == [4096, 1 << 20]
    assert profile.threads[0].threads == 1
    assert all(p.seconds.num >= 5 for p in profile.steps)


def test_times_grow_with_the_work(measured: tuple[Profile, str, Path]) -> None:
    """Far apart corners only, so that a busy machine does not matter."""
    profile, _, _ = measured
    at = {(p.streams, p.nodes, p.context): p.seconds.median for p in profile.steps}

    assert at[3, 64, 512] > at[1, 1, 16]
    assert at[3, 64, 512] > at[3, 1, 512]
    assert profile.prefill[1].tokens_s.median > profile.prefill[0].tokens_s.median
    assert all(p.whole.median > p.step.median for p in profile.drafts)
    assert float(profile.cost.seconds(3, 64, 512)) > float(profile.cost.seconds(1, 1, 16)) > 0


def test_the_file_is_the_profile_and_its_place_is_printed(measured: tuple[Profile, str, Path]) -> None:
    """Round trip through JSON; the tables and the formula stand on stdout."""
    profile, text, path = measured

    assert Profile.load(path) == profile
    assert f"written to {path}" in text
    for part in (
        "median ms of a step",
        "T = ",
        "residual",
        "tokens/s",
        "whole draft ms",
        "fastest decode",
        "MB/s",
    ):
        assert part in text


def test_the_card_names_machine_and_weights(measured: tuple[Profile, str, Path], folder: Path) -> None:
    """What a planner has to compare before it believes the numbers."""
    profile, _, _ = measured

    assert profile.target.version == profile.draft.version and profile.target.folder == str(folder)
    assert profile.target.kv_bytes_per_token == 2 * 2 * 1 * 16 * 4
    assert profile.machine.cores >= 1 and profile.machine.versions["torch"] == torch.__version__


def test_small_pools_and_contexts_measure_what_fits(folder: Path) -> None:
    """A pool of 4096 tokens for 64 streams, 32 tokens of context: no error, shorter points."""
    plan = Plan(
        nodes=(1, 32), contexts=(64,), streams=(1, 64, 8192), chunks=(64,), prompt=64, least_s=0, least_num=1
    )
    settings = (
        "decode.kv_memory_mb=1",
        "draft.kv_memory_mb=1",
        "limits.max_context=32",
        "speculation.depth=16",
    )
    pair = PairBench(config_of(folder, *settings), plan, lambda _: None)

    assert [(p.streams, p.nodes, p.context) for p in pair.steps()] == [(1, 1, 31), (64, 1, 31)]
    assert [(p.chunk, p.tokens) for p in pair.prefill()] == [(32, 32)]
    assert list(pair.drafts()) == []
    assert len(list(pair.threads([1]))) == 1


def test_work_is_repeated_until_the_plan_is_content() -> None:
    """One run to warm up is not counted."""
    calls: list[int] = []
    found = repeated(lambda: calls.append(0), Plan(least_s=0.0, least_num=7))

    assert isinstance(found, Spread) and found.num == 7 and len(calls) == 8


# --- the link -------------------------------------------------------------------------------------------


def test_the_link_is_measured_between_two_processes() -> None:
    """Sizes far apart: more bytes take longer; what arrived is what was sent (it is looked at)."""
    points = link.measure_link([4096, 32 << 20], repeats=5, interface="127.0.0.1", timeout_s=20.0)

    assert [point.num_bytes for point in points] == [4096, 32 << 20]
    assert all(isinstance(point, LinkPoint) and point.seconds.num == 5 for point in points)
    assert points[1].seconds.median > points[0].seconds.median
    assert points[1].num_bytes / points[1].seconds.median < 1e12


def test_a_sender_that_dies_is_an_error_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process ends after its first message: named, not waited for."""
    import multiprocessing

    monkeypatch.setattr(link, "_send", _dies)
    with pytest.raises(TransferError, match="link_peer_lost"):
        link.measure_link([4096], repeats=1, interface="127.0.0.1", timeout_s=5.0)

    assert multiprocessing.active_children() == []


def _dies(pipe: object, *_: object) -> None:
    pipe.send(0)  # type: ignore[attr-defined]
    os._exit(3)


# --- the command ----------------------------------------------------------------------------------------


def test_an_output_that_is_no_profile_is_left_alone(folder: Path, tmp_path: Path) -> None:
    """Looked at before anything is measured; a folder or a place that does not exist are refused too."""
    mine = tmp_path / "mine.json"
    mine.write_text('{"my": "data"}')
    for path in (mine, tmp_path, tmp_path / "no" / "p.json"):
        with pytest.raises(ConfigError, match="--out"):
            main.run(config_of(folder), path, plan=TINY)

    assert mine.read_text() == '{"my": "data"}'


def test_the_command_takes_the_options_of_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preset, file, settings; --quick and --out go through; the default file is in the current folder."""
    calls: list[tuple[ClusterConfig, Path, bool]] = []
    monkeypatch.setattr(main, "run", lambda config, path, *, quick: calls.append((config, path, quick)))
    runner = CliRunner()
    out = str(tmp_path / "p.json")
    first = runner.invoke(cli.app, ["profile", "--set", "decode.threads=2", "--quick", "--out", out])
    second = runner.invoke(cli.app, ["profile", "--preset", "laptop"])
    both = runner.invoke(cli.app, ["profile", "--preset", "laptop", "--config", "x.yaml"])

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert (calls[0][0].decode.threads, str(calls[0][1]), calls[0][2]) == (2, out, True)
    assert (str(calls[1][1]), calls[1][2]) == ("paceline-profile.json", False)
    assert isinstance(both.exception, ConfigError)


def test_a_pair_of_two_tokenizers_is_refused_before_anything_is_measured(
    folder: Path, tmp_path: Path
) -> None:
    """The first token that differs is named, and no file is written."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    tree = json.loads((other / "tokenizer.json").read_text())
    tree["added_tokens"][0]["content"] = "<|other|>"
    (other / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=re.escape("<|other|>")):
        main.run(config_of(folder, f"model.draft={other}"), tmp_path / "p.json", plan=TINY)

    assert not (tmp_path / "p.json").exists()


@pytest.mark.slow
def test_quick_takes_well_under_a_minute_on_a_busy_machine(tmp_path: Path) -> None:
    """The whole command on the bundled pair, imports included: 20 s alone, here three times that."""
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(
        [sys.executable, "-m", "paceline.deploy.cli", "profile", "--quick"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert Profile.load(tmp_path / "paceline-profile.json").is_quick
