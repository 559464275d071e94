"""Values -> what Helm's own engine renders, installs and upgrades; and a rendered object -> what is wrong with it."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from memory_kube import MemoryKube

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "paceline"
CRD = Path(__file__).parent / "deploy" / "helm" / "data" / "rayservices.crd.json"
KUBERNETES = ("1.27", "1.33")
"""Versions whose schemas the core kinds must satisfy: the oldest that the chart allows, and a newer one."""
Object = dict[str, Any]


@dataclass(frozen=True)
class Release:
    """What one install or upgrade came to."""

    number: int
    objects: list[Object]
    notes: str

    def all(self, kind: str) -> dict[str, Object]:
        return {found["metadata"]["name"]: found for found in self.objects if found["kind"] == kind}

    def one(self, kind: str, ending: str = "") -> Object:
        found = [o for name, o in self.all(kind).items() if name.endswith(ending)]
        assert len(found) == 1, (kind, ending, list(self.all(kind)))
        return found[0]

    @property
    def service(self) -> Object:
        return self.one("RayService")

    @property
    def serve_config(self) -> Object:
        loaded: Object = yaml.safe_load(self.service["spec"]["serveConfigV2"])
        return loaded

    @property
    def pods(self) -> dict[str, Object]:
        """Pod templates by role; the head's is "head"."""
        cluster = self.service["spec"]["rayClusterConfig"]
        groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
        return {"head": cluster["headGroupSpec"]["template"], **groups}

    @property
    def groups(self) -> dict[str, Object]:
        return {g["groupName"]: g for g in self.service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


class Helm:
    """The engine, as `helm` uses it, on a Kubernetes API in memory."""

    def __init__(self, kube: MemoryKube, folder: Path) -> None:
        self.kube = kube
        import helm_sdkpy  # a Go runtime, which only these tests need

        kubeconfig = kube.write_kubeconfig(folder / "kubeconfig")
        self._sdk = helm_sdkpy
        self._configuration = helm_sdkpy.Configuration(namespace="default", kubeconfig=str(kubeconfig))

    def install(self, values: Object | None = None, name: str = "paceline") -> Release:
        """
        Raises:
            HelmError: with what the engine says of the values or templates.
        """
        action = self._sdk.Install(self._configuration)
        return _release(asyncio.run(action.run(name, str(CHART), values=values or {}, wait=False)))

    def upgrade(self, values: Object | None = None, name: str = "paceline") -> Release:
        action = self._sdk.Upgrade(self._configuration)
        return _release(asyncio.run(action.run(name, str(CHART), values=values or {}, wait=False)))

    def uninstall(self, name: str = "paceline") -> None:
        asyncio.run(self._sdk.Uninstall(self._configuration).run(name, wait=False))

    def lint(self) -> Object:
        result: Object = asyncio.run(self._sdk.Lint(self._configuration).run(str(CHART)))
        return result


def _release(answer: Object) -> Release:
    objects = [found for found in yaml.safe_load_all(answer["manifest"]) if found]
    return Release(int(answer["version"]), objects, answer["info"].get("notes", ""))


def nested(path: str, value: Any) -> Object:
    """("decode.pod.min", 3) -> {"decode": {"pod": {"min": 3}}}."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def complaints(found: Object) -> list[str]:
    """What Kubernetes, or KubeRay's definition, would refuse of an object."""
    if found["kind"] == "RayService":
        return [f"{e.json_path}: {e.message[:200]}" for e in _ray_service().iter_errors(found)]
    if found["apiVersion"].startswith("monitoring.coreos.com"):  # tests look at these by themselves
        return []
    from kubernetes_validate import validate

    wrong = []
    for version in KUBERNETES:
        try:
            validate(found, version, strict=True)
        except Exception as error:  # noqa: BLE001  # its own classes differ between versions
            wrong.append(f"{version}: {error}")
    return wrong


@functools.cache
def _ray_service() -> Any:
    import jsonschema

    crd = json.loads(CRD.read_text())
    schema = copy.deepcopy(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    _close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def _close(node: Object) -> None:
    """Kubernetes' dialect as plain JSON Schema: unknown fields are errors, as `fieldValidation=Strict` has it."""
    if node.get("x-kubernetes-int-or-string"):
        node.pop("type", None)
        node["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if node.get("nullable") and isinstance(node.get("type"), str):
        node["type"] = [node["type"], "null"]
    properties = node.get("properties")
    if properties and not node.get("x-kubernetes-preserve-unknown-fields"):
        node.setdefault("additionalProperties", False)
    below = [*(properties or {}).values(), node.get("items"), node.get("additionalProperties")]
    for child in below:
        if isinstance(child, dict):
            _close(child)
