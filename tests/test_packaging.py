"""pyproject.toml -> what ships: the list of packages and data equals the tree, and `kernels` is never ours alone."""

import importlib.util
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MAPPED: dict[str, str] = SETUPTOOLS["package-dir"]
DATA_FOLDERS = ("deploy/models", "deploy/presets", "cluster/admin/static")


def package_of(folder: Path) -> str:
    """The import name of a folder under one of the mapped roots."""
    top, *rest = folder.relative_to(ROOT).parts
    names = {directory: package for package, directory in MAPPED.items()}
    return ".".join([names[top], *rest])


def folders_with_python() -> set[str]:
    """The import names of all folders under the mapped roots that hold Python."""
    return {package_of(file.parent) for root in MAPPED.values() for file in (ROOT / root).rglob("*.py")}


def shipped_data() -> set[Path]:
    """The files that package-data's patterns pick out of the tree."""
    return {
        file
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for file in (ROOT / MAPPED[package]).glob(pattern)
        if file.is_file()
    }


def test_the_package_list_equals_the_folders_with_python() -> None:
    """A folder missing from the list would be missing from the wheel, and an editable install would hide it."""
    listed = set(SETUPTOOLS["packages"])
    folders = folders_with_python()

    # A namespace package may be listed before its first module stands: `paceline.kernels` has no __init__.py.
    assert folders - listed == set(), "add these to [tool.setuptools] packages"
    assert listed - folders - {"paceline.kernels"} == set(), "listed, but no Python there"


def test_every_package_but_kernels_has_an_init_with_a_docstring_only() -> None:
    """`import paceline.cluster` runs nothing; the bundled models keep their loader in their __init__."""
    for package in set(SETUPTOOLS["packages"]) - {"paceline.kernels", "paceline.deploy.models"}:
        top, *rest = package.removeprefix("paceline.").split(".")
        source = (ROOT.joinpath(MAPPED[f"paceline.{top}"], *rest) / "__init__.py").read_text()

        assert source.startswith('"""'), package
        assert source.rstrip().endswith('"""') and source.count('"""') == 2, package


def test_neither_the_root_nor_kernels_has_an_init() -> None:
    """With kernels/__init__.py a bare `import kernels`, which transformers does, would find ours and break."""
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("first_on_path", [False, True], ids=["as it is", "root first on sys.path"])
def test_a_bare_import_of_kernels_never_finds_a_module_of_ours(
    first_on_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray and `python -m` put the working directory first: a portion of a namespace may show, a module may not."""
    if first_on_path:
        monkeypatch.syspath_prepend(str(ROOT))

    spec = importlib.util.find_spec("kernels")

    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT)


def test_an_installed_kernels_package_wins_over_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same import finds a package of that name further down the path, even with the root first."""
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    installed = tmp_path / "kernels" / "__init__.py"
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))

    spec = importlib.util.find_spec("kernels")

    assert spec is not None and spec.origin == str(installed)


def test_every_model_and_preset_file_ships() -> None:
    """What the bundled models and presets need is named by package-data, so the wheel cannot forget it."""
    present = {
        file
        for folder in DATA_FOLDERS
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and file.suffix not in {".py", ".pyc"} and not file.name.startswith(".")
    }

    assert present - shipped_data() == set(), "add a pattern to [tool.setuptools.package-data]"


@pytest.mark.parametrize("package", sorted(MAPPED))
def test_every_top_package_ships_its_type_marker(package: str) -> None:
    """Type checkers read our annotations only where py.typed is installed."""
    assert ROOT / MAPPED[package] / "py.typed" in shipped_data()


def test_the_console_script_points_at_a_listed_package() -> None:
    """`paceline` on the command line is a function in a package that ships."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["paceline"].partition(":")

    assert module.rpartition(".")[0] in SETUPTOOLS["packages"]
    assert fnmatch(function, "[a-z]*")
