"""deploy/docker -> an image that a linter passes, pinned and without root. No engine runs here: it is read, not built."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "docker"
HADOLINT = Path(sys.executable).with_name("hadolint")
STEPS = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", (FOLDER / "Dockerfile").read_text())).split("\n")
STEPS = [step for step in STEPS if step]
CONSTRAINTS = {
    canonicalize_name(line.split("==")[0]): line.split("==")[1]
    for line in (FOLDER / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}


def stages() -> dict[str, list[str]]:
    """Name of a stage -> its steps, the one it stands on included."""
    found: dict[str, list[str]] = {}
    name = ""
    for step in STEPS:
        if step.startswith("FROM "):
            _, base, _, name = step.split()
            found[name] = list(found.get(base, []))
        if name:
            found[name].append(step)
    return found


def hadolint(path: Path) -> str:
    if not HADOLINT.exists():
        pytest.skip("hadolint: `make dev` installs it")
    done = subprocess.run(
        [HADOLINT, "--no-color", str(path)], capture_output=True, text=True, check=False, env={**os.environ}
    )
    return done.stdout


def test_the_linter_has_nothing_to_say() -> None:
    assert hadolint(FOLDER / "Dockerfile") == ""


def test_the_linter_sees_what_is_wrong(tmp_path: Path) -> None:
    """The negative control: an unpinned base, an unpinned package, a root at the end."""
    path = tmp_path / "Dockerfile"
    path.write_text("FROM python\nRUN apt-get install gcc\nUSER root\n")

    found = hadolint(path)

    assert {"DL3006", "DL3008", "DL3002"} <= set(re.findall(r"DL\d{4}", found))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_nothing_runs_as_root(target: str) -> None:
    """By number, so that Kubernetes can check it; and it is the user that the chart sets."""
    last = [step for step in stages()[target] if step.startswith("USER")][-1]
    values = yaml.safe_load((ROOT / "helm" / "paceline" / "values.yaml").read_text())

    assert last == "USER 1000:1000" and stages()[target][-1] == last
    assert values["user"] == 1000
    assert "--uid 1000" in " ".join(stages()[target])


def test_every_base_and_package_is_pinned() -> None:
    bases = [step.split()[1] for step in STEPS if step.startswith("FROM ")]
    outside = {base for base in bases if base not in stages()}

    assert outside and all(re.search(r":\d+\.\d+\.\d+", base) for base in outside)
    for step in STEPS:
        if "pip install" in step:
            assert "torch==" in step or "--constraint /constraints.txt" in step
    assert "PIP_CONSTRAINT=/constraints.txt" in " ".join(stages()["wheel"])  # what the wheel is built with


def test_pins_are_within_what_paceline_asks_for() -> None:
    """And each thing asked for has one: `deploy/docker/pin.sh` makes them anew."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *project["optional-dependencies"]["postgres"],
        "setuptools>=77",
        "s3fs",
    ]

    for text in asked:
        requirement = Requirement(text)
        version = CONSTRAINTS.get(canonicalize_name(requirement.name))
        assert version, f"{text}: run deploy/docker/pin.sh"
        assert requirement.specifier.contains(version), (text, version)
    torch = re.findall(r"torch==(\S+)", " ".join(STEPS))
    assert set(torch) == {CONSTRAINTS["torch"]}


def test_chart_makefile_and_image_agree() -> None:
    values = yaml.safe_load((ROOT / "helm" / "paceline" / "values.yaml").read_text())
    makefile = (ROOT / "Makefile").read_text()

    assert values["rayVersion"] == CONSTRAINTS["ray"]
    assert f"TORCH_VERSION ?= {CONSTRAINTS['torch']}" in makefile


def test_what_is_copied_exists_and_is_all_the_wheel_needs() -> None:
    """The wheel's stage has every folder that setuptools maps, and no other stage sees the tree."""
    copied = [s.split()[1:-1] for s in STEPS if s.startswith("COPY ") and "--from" not in s]
    names = {name for group in copied for name in group}
    mapped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-dir"
    ].values()
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()

    assert all((ROOT / name).exists() for name in names)
    assert set(mapped) <= names and {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert "*" in ignored and {f"!{name}" for name in (*mapped, "pyproject.toml")} <= set(ignored)


def test_both_targets_carry_an_environment_and_the_path_to_it() -> None:
    for target in ("cpu", "cuda"):
        steps = " ".join(stages()[target])
        assert f"--from=packages-{target} /opt/paceline /opt/paceline" in steps
        assert "PATH=/opt/paceline/bin" in steps and "profile.d" in steps
