"""The rendered RayService -> Kubernetes' own server of custom resources, with KubeRay's definition: would it be taken?

The server is built once by `make crd-server`; without it these tests skip and say so.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import CRD, Release

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "crd-server"
SERVER = CACHE / "apiextensions-apiserver"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DRY_RUN = "/apis/ray.io/v1/namespaces/default/rayservices?dryRun=All&fieldValidation=Strict"
Object = dict[str, Any]
Call = Callable[..., tuple[int, Object]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_certificates(folder: Path) -> None:
    """An authority, the server's certificate and that of an administrator."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    openssl("req", "-x509", *new, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    for name, subject, extra in (
        ("server", "/CN=server", "subjectAltName=IP:127.0.0.1"),
        ("admin", "/O=system:masters/CN=admin", "extendedKeyUsage=clientAuth"),
    ):
        (folder / f"{name}.ext").write_text(extra)
        openssl("req", *new, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", *signed, "-extfile", f"{name}.ext", "-out", f"{name}.crt"
        )


def start(folder: Path, port: int, etcd_port: int) -> list[subprocess.Popen[bytes]]:
    url, peers = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{free_port()}"
    store = ["etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", url]
    store += ["--advertise-client-urls", url, "--listen-peer-urls", peers]
    store += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
    nowhere = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "none", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "none", "user": {}}],
        "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
        "current-context": "none",
    }
    (folder / "none.yaml").write_text(yaml.safe_dump(nowhere))
    kinds = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    plugins = "NamespaceLifecycle,MutatingAdmissionWebhook,ValidatingAdmissionWebhook"
    plugins += ",ValidatingAdmissionPolicy,MutatingAdmissionPolicy"
    server = [
        str(SERVER),
        f"--etcd-servers={url}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--tls-cert-file={folder}/server.crt",
        f"--tls-private-key-file={folder}/server.key",
        f"--client-ca-file={folder}/ca.crt",
        *(f"--{kind}={folder}/none.yaml" for kind in kinds),
        "--authentication-skip-lookup=true",
        "--enable-priority-and-fairness=false",
        f"--disable-admission-plugins={plugins}",
    ]
    with (folder / "log").open("w") as log:
        return [subprocess.Popen(command, stdout=log, stderr=log) for command in (store, server)]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """(method, path, object) -> (status, answer) of a server that knows RayService."""
    if not SERVER.exists():
        pytest.skip(f"no {SERVER}: `make crd-server` builds it")
    if shutil.which("etcd") is None:
        pytest.skip("no etcd: the package etcd-server has it")
    folder = tmp_path_factory.mktemp("crd")
    make_certificates(folder)
    port = free_port()
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
    processes = start(folder, port, free_port())

    def call(method: str, path: str, sent: Object | None = None) -> tuple[int, Object]:
        data = None if sent is None else json.dumps(sent).encode()
        url, headers = f"https://127.0.0.1:{port}{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, context=context, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            try:
                return error.code, json.loads(text)
            except ValueError:
                return error.code, {"message": text}

    try:
        define(call, processes, folder / "log")
        yield call
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(20)


def define(call: Call, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    """Hand KubeRay's definition over and wait until its kind is served."""
    definition, end = json.loads(CRD.read_text()), time.monotonic() + 60
    code = 0
    while code not in (201, 409):
        assert time.monotonic() < end and all(p.poll() is None for p in processes), log.read_text()[-3000:]
        try:
            code, answer = call("POST", DEFINITIONS, definition)
            assert code < 400 or code in (403, 409, 429) or code >= 500, answer
        except OSError:
            code = 0
        time.sleep(0.3)
    while call("GET", "/apis/ray.io/v1/namespaces/default/rayservices")[0] != 200:
        assert time.monotonic() < end, call("GET", f"{DEFINITIONS}/rayservices.ray.io")
        time.sleep(0.3)


@pytest.mark.parametrize("which", ["default", "everything"])
def test_the_server_takes_what_the_chart_renders(
    which: str, call: Call, request: pytest.FixtureRequest
) -> None:
    """Types, required and unknown fields, and the definition's own rules."""
    release: Release = request.getfixturevalue(which)

    code, answer = call("POST", DRY_RUN, release.service)

    assert code == 201, answer.get("message")
    assert answer["spec"]["rayClusterConfig"]["authOptions"]["mode"] == "token"


@pytest.mark.parametrize(
    "change, code, words",
    [
        ("type", 422, "replicas"),
        ("unknown", 400, "serveConfigv2"),
        ("missing", 422, "headGroupSpec"),
        ("rule", 422, "managedBy"),
    ],
)
def test_the_server_refuses_what_is_wrong(
    change: str, code: int, words: str, call: Call, default: Release
) -> None:
    """The negative control, with one rule that no schema has: managedBy must name who manages."""
    wrong = copy.deepcopy(default.service)
    cluster = wrong["spec"]["rayClusterConfig"]
    if change == "type":
        cluster["workerGroupSpecs"][0]["replicas"] = "two"
    elif change == "unknown":
        wrong["spec"]["serveConfigv2"] = ""
    elif change == "missing":
        del cluster["headGroupSpec"]
    else:
        cluster["managedBy"] = "nobody"

    found, answer = call("POST", DRY_RUN, wrong)

    assert found == code and words in answer["message"]
