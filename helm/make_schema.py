"""ClusterConfig -> helm/paceline/values.schema.json: the chart refuses what Paceline would refuse, with the same ranges.

Run as `python helm/make_schema.py`; a test compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.cluster.config import ClusterConfig, presets

TARGET = Path(__file__).parent / "paceline" / "values.schema.json"
Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_NAME: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_QUANTITY: Schema = {
    "anyOf": [
        {"type": "number", "minimum": 0},
        {"type": "string", "pattern": "^[0-9]+([.][0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"},
    ]
}
_PERCENT_OR_NUMBER: Schema = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]{1,3}%$"}]
}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _number(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _closed(properties: Schema, *required: str) -> Schema:
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": list(required)} if required else schema


_ANY_OBJECT: Schema = {"type": "object"}
_RESOURCES = _closed(
    {name: {"type": "object", "additionalProperties": _QUANTITY} for name in ("requests", "limits")}
)
_IMAGE = {
    "repository": {"type": "string", "pattern": "^[a-z0-9][a-z0-9._/:-]*$"},
    "tag": {"type": "string", "pattern": "^[A-Za-z0-9_]?[A-Za-z0-9_.-]{0,127}$"},
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "pullPolicy": _one_of("Always", "IfNotPresent", "Never"),
}
_TOLERATION = _closed(
    {
        "key": _TEXT,
        "operator": _one_of("Exists", "Equal"),
        "value": _TEXT,
        "effect": _one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        "tolerationSeconds": {"type": "integer"},
    }
)
_ENV = _closed(
    {
        "name": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
        "value": _TEXT,
        "valueFrom": _ANY_OBJECT,
    },
    "name",
)
_POD: Schema = {
    "image": _closed(_IMAGE),
    "resources": _RESOURCES,
    "nodeSelector": _TEXTS,
    "tolerations": _list(_TOLERATION),
    "affinity": _ANY_OBJECT,
    "labels": _TEXTS,
    "annotations": _TEXTS,
    "env": _list(_ENV),
}
_SPREAD: Schema = {"topologySpreadConstraints": _list(_ANY_OBJECT)}
_GPU: Schema = {
    "gpuResource": {"type": "string", "pattern": "^[a-z0-9.-]+/[A-Za-z0-9._-]+$"},
    "runtimeClassName": _NAME,
}
_BOUNDS: Schema = {"replicas": _number(1, 64), "min": _number(0, 1024), "max": _number(1, 1024)}
_PODS: dict[str, Schema] = {
    "control": _POD,
    "gateway": {**_POD, **_SPREAD},
    "prefill": {**_POD, **_SPREAD, **_GPU, **_BOUNDS},
    "decode": {**_POD, **_SPREAD, **_GPU, **_BOUNDS},
    "draft": {**_POD, **_SPREAD, **_GPU, **_BOUNDS},
    "trainer": {**_POD, **_GPU},
}
"""The pods of a role stand beside its configuration."""


def _volume(**more: Schema) -> Schema:
    modes = _one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
    return _closed(
        {
            "claim": _NAME,
            "create": _FLAG,
            "size": _QUANTITY,
            "storageClass": _NAME,
            "accessModes": {**_list(modes), "minItems": 1},
            **more,
        }
    )


def _kubernetes() -> dict[str, Schema]:
    """Values that are not Paceline's configuration."""
    return {
        "preset": _one_of(*presets()),
        "image": _closed(_IMAGE, "repository"),
        "imagePullSecrets": _list(_closed({"name": _NAME}, "name")),
        "rayVersion": {"type": "string", "pattern": "^[0-9]+[.][0-9]+[.][0-9]+$"},
        "nameOverride": _NAME,
        "fullnameOverride": _NAME,
        "serviceAccount": _closed({"create": _FLAG, "name": _NAME, "annotations": _TEXTS}),
        "user": _number(1, 2**31 - 1),
        "secrets": _closed({"keys": _NAME, "admin": _NAME, "env": _list(_NAME)}),
        "weights": _volume(url={"type": "string", "pattern": "^([a-z0-9+]+://.+)?$"}),
        "state": _volume(),
        "service": _closed(
            {"type": _one_of("ClusterIP", "NodePort", "LoadBalancer"), "port": _PORT, "annotations": _TEXTS}
        ),
        "ingress": _closed(
            {
                "enabled": _FLAG,
                "className": _NAME,
                "host": _NAME,
                "tlsSecret": _NAME,
                "annotations": _TEXTS,
            }
        ),
        "autoscaler": _closed(
            {"enabled": _FLAG, "idleTimeoutSeconds": _number(0, 86400), "resources": _RESOURCES}
        ),
        "metrics": _closed(
            {
                "podMonitor": _FLAG,
                "rules": _FLAG,
                "dashboards": _FLAG,
                "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
                "labels": _TEXTS,
            }
        ),
        "podDisruptionBudget": _closed(
            {"enabled": _FLAG, "maxUnavailable": _PERCENT_OR_NUMBER, "head": _PERCENT_OR_NUMBER}
        ),
        "networkPolicy": _closed(
            {
                "enabled": _FLAG,
                "clients": _list(_ANY_OBJECT),
                "operators": _list(_ANY_OBJECT),
                "kuberay": _closed({"namespaceSelector": _ANY_OBJECT, "podSelector": _ANY_OBJECT}),
            }
        ),
        "upgrade": _closed({"strategy": _one_of("NewCluster", "None")}),
        "global": _ANY_OBJECT,
    }


def make_schema() -> Schema:
    """The whole document."""
    model = ClusterConfig.model_json_schema()
    definitions: dict[str, Schema] = model["$defs"]
    sections = {name: dict(field) for name, field in model["properties"].items()}
    for name, field in sections.items():
        field.pop("default", None)  # values.yaml has those that differ from the preset's
        if name in _PODS:
            definition = definitions[field["$ref"].rpartition("/")[2]]
            definition["properties"]["pod"] = _closed(_PODS[name])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "made by helm/make_schema.py from paceline.cluster.config",
        "title": "Values of the paceline chart",
        **_closed({**sections, **_kubernetes()}),
        "$defs": definitions,
    }


def text() -> str:
    """As it stands in the file."""
    return json.dumps(_without_defaults(make_schema()), indent=1) + "\n"


def _without_defaults(node: Any) -> Any:
    """Defaults and titles of single fields say nothing here; descriptions are what an editor shows."""
    if isinstance(node, list):
        return [_without_defaults(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_defaults(value)
        for key, value in node.items()
        if not (key in ("default", "title") and isinstance(node.get("type"), str))
    }


if __name__ == "__main__":
    TARGET.write_text(text())
