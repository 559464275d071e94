"""Other people's clients, as their packages come, against one running cluster -> what they make of its answers is right."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from bundled import MODEL, TARGET
from client_environments import client_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs" / "reference" / "clients.md").read_text()
QUESTION = "What is 12 + 30? Show the work."
NUM_REQUESTS = 8
CHOICES = [
    ("What is 12 + 30? Show the work.", ["\nones: 2 + 0 = 2", "\nones: 7 + 1 = 3"]),
    ("def add(a, b):\n    return", [" a + b", " SELECT name", " 52000 euros"]),
    ("SELECT name FROM", [" customers", " def"]),
]
"""Beginnings, and how each might go on; lm_eval counts white space between them to what follows."""


def run(client: str, command: Sequence[str], folder: Path, **variables: str) -> str:
    """A program of a client's environment, in a folder of its own; what it printed."""
    python = client_python(client)
    if python is None:
        pytest.skip(f"{client.upper()} IS NOT TESTED: `make clients` builds an environment for it")
    program = (
        [str(python), *command[1:]]
        if command[0] == "python"
        else [str(python.parent / command[0]), *command[1:]]
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "RAY_", "PACELINE"))
    }
    done = subprocess.run(
        program,
        cwd=folder,
        env={**kept, "HOME": str(folder), "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hf"), **variables},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n---\n{done.stderr[-3000:]}"
    return done.stdout


def said(client: str, cluster: Any, folder: Path) -> dict[str, Any]:
    """What a `drive_*.py` printed."""
    printed = run(client, ["python", str(HERE / f"drive_{client}.py"), cluster.url, MODEL], folder)
    answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return answer


def on_page(cluster: Any, pattern: str) -> str:
    """What the documentation shows, with this cluster's addresses."""
    found = re.search(pattern, PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, pattern
    shown = found[1].replace("http://127.0.0.1:8000", cluster.url)
    return shown.replace("http://127.0.0.1:8001", cluster.control)


def benchmark(cluster: Any, name: str) -> list[str]:
    """The page's command, with fewer requests."""
    command = on_page(cluster, rf"^\$ ({name} .*?[^\\])$").replace("\\\n>", "")
    assert command.count("100") == 1
    return shlex.split(command.replace("100", f"{NUM_REQUESTS}"))


@pytest.fixture
def expected(cluster: Any) -> str:
    """What OpenAI's own client gets."""
    answer = cluster.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32, seed=7
    )
    return str(answer.choices[0].message.content)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """The served model's, in the folder where clients run, as from the root of a clone."""
    name = "deploy/models/bundled/target"
    shutil.copytree(TARGET, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    return name


def test_langchain(cluster: Any, expected: str, tmp_path: Path) -> None:
    """Asked once, streamed, in batches and asynchronously: one text; usage and errors arrive as its own types."""
    answer = said("langchain", cluster, tmp_path)

    assert answer["text"] == answer["streamed"] == answer["batch"][0] == expected
    assert answer["finish"] in ("stop", "length") and answer["later"] > 3
    assert answer["usage"]["output_tokens"] == answer["scored"] > 10
    assert [usage["output_tokens"] for usage in answer["streamed_usage"]] == [answer["scored"]]
    assert answer["plain"] and answer["refused"] == "model_not_found"


def test_litellm(cluster: Any, expected: str, tmp_path: Path) -> None:
    """As its provider for vLLM: chat, stream, several choices, completions, and errors as its own classes."""
    answer = said("litellm", cluster, tmp_path)

    assert answer["text"] == answer["streamed"] == answer["later"] == expected
    assert answer["streamed_usage"] == answer["usage"][1:]
    assert len(answer["several"]) == 2 and answer["plain"]
    assert answer["errors"] == [["NotFoundError", 404], ["BadRequestError", 400]]


def test_programs_of_the_documentation_print_one_text(cluster: Any, tmp_path: Path) -> None:
    """As the page has it: two libraries, one seed."""
    texts = {
        client: run(client, ["python", "-c", on_page(cluster, program)], tmp_path)
        for client, program in (
            ("langchain", r"^```python[^\n]*\n(from langchain_openai.*?)^```"),
            ("litellm", r"^```python[^\n]*\n(import litellm.*?)^```"),
        )
    }

    assert len(texts["litellm"]) > 10 and texts["litellm"] == texts["langchain"]


def test_lm_eval(cluster: Any, expected: str, tokenizer: str, tmp_path: Path) -> None:
    """Multiple choice by log-probabilities of token ids, and text to write: its scores are those of the model itself."""
    rows = [{"text": text, "choices": choices, "label": 0} for text, choices in CHOICES]
    task(
        tmp_path,
        "choose",
        rows,
        output_type="multiple_choice",
        doc_to_choice="{{choices}}",
        doc_to_target="label",
    )
    plain = cluster.client().completions.create(
        model=MODEL, prompt=CHOICES[1][0], temperature=0, max_tokens=12
    )
    rows = [{"text": CHOICES[1][0], "target": plain.choices[0].text}]
    written = {"until": ["<never>"], "max_gen_toks": 12, "temperature": 0, "do_sample": False}
    task(
        tmp_path,
        "write",
        rows,
        output_type="generate_until",
        doc_to_target="{{target}}",
        generation_kwargs=written,
    )
    model = f"model={MODEL},base_url={cluster.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={tokenizer}"

    run(
        "lm_eval",
        ["lm_eval", "--model", "local-completions", "--model_args", f"{model},num_concurrent=2",
         "--tasks", "choose,write", "--include_path", ".", "--output_path", "out", "--log_samples"],
        tmp_path,
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
    )  # fmt: skip

    samples = {name: samples_of(tmp_path, name) for name in ("choose", "write")}
    assert samples["write"][0]["exact_match"] == 1
    for sample, (text, choices) in zip(samples["choose"], CHOICES, strict=True):
        found = [float(answer[0][0]) for answer in sample["resps"]]
        assert found == pytest.approx([log_likelihood(text, choice) for choice in choices], abs=2e-3)


def task(folder: Path, name: str, rows: list[dict[str, Any]], **fields: Any) -> None:
    """A task of lm_eval: what is asked, and how it is scored."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metric = {"metric": "acc" if fields["output_type"] == "multiple_choice" else "exact_match"}
    whole = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "target_delimiter": "",
        "metric_list": [metric],
        **fields,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole))


def samples_of(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
    return sorted(
        (json.loads(line) for line in path.read_text().splitlines()), key=lambda sample: sample["doc_id"]
    )


def log_likelihood(text: str, rest: str) -> float:
    """Of `rest` behind `text`, by transformers on the same weights; tokens as lm_eval cuts them."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    whole = tokenizer.encode(text + rest, add_special_tokens=False)
    start = len(tokenizer.encode(text, add_special_tokens=False))
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.inference_mode():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(scores[at - 1, whole[at]].item() for at in range(start, len(whole)))


def test_guidellm(cluster: Any, tokenizer: str, tmp_path: Path) -> None:
    """Two streams at a time, to their full length, with usage in every event: all of them succeed and are counted."""
    command = [*benchmark(cluster, "guidellm"), "--output", "kind=json,path=report.json"]
    run("guidellm", command, tmp_path, HF_HUB_OFFLINE="1")

    (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = report["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert requests["errored"] == [] and requests["incomplete"] == []
    assert {request["output_tokens"] for request in requests["successful"]} == {64}


def test_aiperf(cluster: Any, tokenizer: str, tmp_path: Path) -> None:
    """It shows how drafts were accepted, from our answers and unasked; and reads our metrics."""
    command = [*benchmark(cluster, "aiperf"), "--artifact-dir", "out", "--ui", "simple"]
    printed = run("aiperf", command, tmp_path)

    (path,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    histogram = {int(num): steps for num, steps in report["pooled_spec_decode_acceptance_histogram"].items()}
    print({name: figure for name, figure in report.items() if "spec_decode" in name})
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert sum(histogram.values()) > 0 and sum(num * steps for num, steps in histogram.items()) > 0
    assert report["spec_decode_acceptance_length"]["avg"] > 1.0
    assert 0.0 < report["spec_decode_overall_draft_acceptance_rate"]["avg"] <= 100.0
    assert "Accepted drafts per step" in printed
    scraped = list((tmp_path / "out").rglob("server_metrics_export.json*"))
    assert scraped and "paceline_" in scraped[0].read_text()
