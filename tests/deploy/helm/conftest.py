"""Helm's engine on a Kubernetes API in memory, one for each test that changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import Helm, Release
from memory_kube import MemoryKube

EVERYTHING = Path(__file__).parent / "data" / "everything.yaml"


@pytest.fixture(scope="session", autouse=True)
def _needs_helm() -> None:
    pytest.importorskip("helm_sdkpy", reason="Helm's engine: `make dev` installs it")


@pytest.fixture
def helm(tmp_path: Path) -> Iterator[Helm]:
    kube = MemoryKube()
    yield Helm(kube, tmp_path)
    kube.close()


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Release]]:
    """Values -> a release, each under a name of its own."""
    kube = MemoryKube()
    helm = Helm(kube, tmp_path_factory.mktemp("helm"))

    def render(values: dict[str, Any] | None = None) -> Release:
        kube.objects.clear()
        return helm.install(values)

    yield render
    kube.close()


@pytest.fixture(scope="module")
def default(rendered: Callable[..., Release]) -> Release:
    """`helm install paceline helm/paceline`, with nothing said."""
    return rendered()


@pytest.fixture(scope="module")
def everything(rendered: Callable[..., Release]) -> Release:
    """Every value that is off by default, used."""
    return rendered(yaml.safe_load(EVERYTHING.read_text()))
