"""Helm's requests -> a Kubernetes API that is a dictionary: enough of one to install, upgrade and look things up.

No controller runs: what is stored stays as it was sent. Client-go sends Secrets as protobuf, which is read here as well.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KINDS = {
    "v1": {
        "secrets": "Secret",
        "services": "Service",
        "configmaps": "ConfigMap",
        "serviceaccounts": "ServiceAccount",
        "namespaces": "Namespace",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
    },
    "ray.io/v1": {"rayservices": "RayService"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "monitoring.coreos.com/v1": {"podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"},
}
VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_OBJECTS = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?"
)
_PROTOBUF = b"k8s\x00"

Object = dict[str, Any]


class MemoryKube:
    """The server. `objects` maps (resource, name) to what was sent."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self._lock = threading.Lock()
        self._version = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def write_kubeconfig(self, path: Path) -> Path:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "memory", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}
            ],
            "users": [{"name": "anybody", "user": {}}],
            "contexts": [{"name": "memory", "context": {"cluster": "memory", "user": "anybody"}}],
            "current-context": "memory",
        }
        path.write_text(json.dumps(config))
        return path

    def named(self, resource: str) -> dict[str, Object]:
        """All objects of a resource, by name; Helm's own records are left out."""
        return {
            name: found
            for (kind, name), found in self.objects.items()
            if kind == resource and not name.startswith("sh.helm.")
        }

    def answer(self, method: str, url: str, media: str, body: bytes) -> tuple[int, Object]:
        parts = urlsplit(url)
        found = _discovery(parts.path)
        if found is not None:
            return 200, found
        match = _OBJECTS.match(parts.path)
        version = (match["core"] or match["group"]) if match else ""
        if not match or match["resource"] not in KINDS.get(version, {}):
            return _status(404, "NotFound")
        with self._lock:
            self._version += 1
            if match["name"] is None and method == "GET":
                return 200, self._list(version, match["resource"], parse_qs(parts.query))
            sent = _decode(body) if body and method != "DELETE" else {}
            name = match["name"] or sent["metadata"]["name"]
            return self._act(method, (match["resource"], name), match["namespace"], sent, media)

    def _list(self, version: str, resource: str, query: dict[str, list[str]]) -> Object:
        wanted = [pair.split("=", 1) for pair in query.get("labelSelector", [""])[0].split(",") if pair]
        items = [
            found
            for (kind, _), found in self.objects.items()
            if kind == resource
            and all((found["metadata"].get("labels") or {}).get(k) == v.lstrip("=") for k, v in wanted)
        ]
        kind = KINDS[version][resource]
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": self._stamp(), "items": items}

    def _act(
        self, method: str, key: tuple[str, str], namespace: str | None, sent: Object, media: str
    ) -> tuple[int, Object]:
        found = self.objects.get(key)
        if method == "POST":
            if found is not None:
                return _status(409, "AlreadyExists")
            return 201, self._store(key, namespace, sent)
        if method == "PATCH" and "apply-patch" in media:
            return (200 if found else 201), self._store(key, namespace, sent)
        if found is None:
            return _status(404, "NotFound")
        if method == "DELETE":
            del self.objects[key]
            return 200, {"kind": "Status", "status": "Success"}
        if method == "PUT":
            return 200, self._store(key, namespace, sent)
        if method == "PATCH":
            return 200, self._store(key, namespace, _merged(found, sent))
        return 200, found

    def _store(self, key: tuple[str, str], namespace: str | None, sent: Object) -> Object:
        uid = self.objects.get(key, {}).get("metadata", {}).get("uid") or str(uuid.uuid4())
        sent.setdefault("metadata", {}).update(namespace=namespace, uid=uid, **self._stamp())
        self.objects[key] = sent
        return sent

    def _stamp(self) -> Object:
        return {"resourceVersion": str(self._version)}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        kube = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                return

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                code, answer = kube.answer(
                    self.command, self.path, self.headers.get("Content-Type") or "", body
                )
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

        return Handler


def _status(code: int, reason: str) -> tuple[int, Object]:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": reason,
        "code": code,
    }


def _discovery(path: str) -> Object | None:
    if path == "/version":
        return VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for version in KINDS:
            group, slash, number = version.partition("/")
            if slash:
                entry = {"groupVersion": version, "version": number}
                groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version not in KINDS:
        return None
    resources = [
        {"name": name, "singularName": "", "kind": kind, "namespaced": name != "namespaces", "verbs": _VERBS}
        for name, kind in KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _merged(below: Object, above: Object) -> Object:
    """JSON merge patch."""
    merged = dict(below)
    for name, value in above.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = value
    return merged


def _decode(body: bytes) -> Object:
    """JSON, or a Secret as protobuf: runtime.Unknown {1: type {1: version, 2: kind}, 2: the Secret}."""
    if not body.startswith(_PROTOBUF):
        decoded: Object = json.loads(body)
        return decoded
    envelope = dict(_fields(body[len(_PROTOBUF) :]))
    about = dict(_fields(envelope[1]))
    assert about[2] == b"Secret", about[2]
    metadata: Object = {"labels": {}, "annotations": {}}
    secret: Object = {"apiVersion": about[1].decode(), "kind": "Secret", "metadata": metadata, "data": {}}
    for number, value in _fields(envelope[2]):
        if number == 1:
            for inner, part in _fields(value):
                if inner == 1:
                    metadata["name"] = part.decode()
                elif inner in (11, 12):
                    key, text = _pair(part)
                    metadata["labels" if inner == 11 else "annotations"][key] = text.decode()
        elif number == 2:
            key, data = _pair(value)
            secret["data"][key] = base64.b64encode(data).decode()
        elif number == 3:
            secret["type"] = value.decode()
    return secret


def _pair(message: bytes) -> tuple[str, bytes]:
    fields = dict(_fields(message))
    return fields.get(1, b"").decode(), fields.get(2, b"")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field that has a length; numbers, which nothing here needs, are skipped."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = number()
        if tag & 7 == 0:
            number()
            continue
        assert tag & 7 == 2, tag
        length = number()
        yield tag >> 3, message[at : at + length]
        at += length
