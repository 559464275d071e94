"""The tree -> who may import whom: cluster decides without torch, kernels stand alone, every module says its arrow."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cluster", "workers", "kernels", "deploy")


def modules_of(package: str) -> Iterator[Path]:
    """The Python files of one top folder, in a fixed order."""
    return iter(sorted((ROOT / package).rglob("*.py")))


def import_name(file: Path) -> str:
    """`cluster/gateway/text.py` -> `paceline.cluster.gateway.text`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(["paceline", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def imported_by(file: Path) -> set[str]:
    """Every module that a file imports, wherever in the file; `from a import b` counts as `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
    return names


def offences(package: str, forbidden: tuple[str, ...]) -> list[str]:
    """`file imports module` for each import that reaches a forbidden module or anything below it."""
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in modules_of(package)
        for name in sorted(imported_by(file))
        if any(name == top or name.startswith(f"{top}.") for top in forbidden)
    ]


def test_cluster_runs_without_torch_and_transformers() -> None:
    """Deciding is numpy at most: importing all of cluster in a fresh process loads no tensor library."""
    names = [import_name(file) for file in modules_of("cluster")]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    found = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not found, f'{name} loads {sorted(found)}'\n"
    )

    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert run.returncode == 0, run.stderr


def test_the_command_line_starts_without_ray_and_torch() -> None:
    """`paceline drain` turns Ray's tokens on before Ray is imported, which reads them once; and no command waits for either."""
    script = (
        "import sys\n"
        "import paceline.deploy.cli\n"
        "found = {'ray', 'torch', 'transformers'} & set(sys.modules)\n"
        "assert not found, f'paceline loads {sorted(found)}'\n"
    )

    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert run.returncode == 0, run.stderr


def test_cluster_never_names_torch_or_what_owns_devices() -> None:
    """Not even inside a function: cluster knows neither workers, kernels nor deploy."""
    forbidden = ("torch", "transformers", "paceline.workers", "paceline.kernels", "paceline.deploy")

    assert offences("cluster", forbidden) == []


def test_kernels_are_functions_of_tensors_and_know_no_one_else() -> None:
    """A kernel can be tested, timed and reused without the rest of Paceline."""
    assert offences("kernels", ("paceline.cluster", "paceline.workers", "paceline.deploy")) == []


def test_workers_do_not_know_how_they_are_deployed() -> None:
    """Wiring depends on the parts, never a part on its wiring."""
    assert offences("workers", ("paceline.deploy",)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_by_the_one_import_name(package: str) -> None:
    """A bare `import cluster` or a relative import would make a second, unequal copy of the same class."""
    bare = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in modules_of(package)
        for name in sorted(imported_by(file))
        if name.startswith(".") or name.partition(".")[0] in {"cluster", "workers", "deploy", "tests"}
    ]

    assert bare == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_opens_with_its_arrow(package: str) -> None:
    """The first docstring line says what goes in and what comes out; an __init__ has just a docstring."""
    for file in modules_of(package):
        docstring = ast.get_docstring(ast.parse(file.read_text(), str(file))) or ""
        first_line = docstring.partition("\n")[0]

        assert first_line, f"{file.relative_to(ROOT)} has no docstring"
        assert file.name == "__init__.py" or "->" in first_line, f"{file.relative_to(ROOT)}: {first_line!r}"
