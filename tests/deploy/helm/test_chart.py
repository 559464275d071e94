"""Values -> objects that Kubernetes and KubeRay take, and a configuration that is Paceline's own."""

from __future__ import annotations

import base64
import copy
import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import CHART, ROOT, Helm, Release, complaints, nested
from paceline.cluster.admin.key import VARIABLE, read_admin_key
from paceline.cluster.config import ClusterConfig, ScalingConfig, check_config
from paceline.cluster.keys import KeyFile
from paceline.deploy.serve_config import read_args, serve_config

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
Render = Callable[..., Release]


def config_of(release: Release) -> ClusterConfig:
    """As the cluster will read it, with the numbers of replicas that Serve is told apart from it."""
    app = release.serve_config["applications"][0]
    config, admin = read_args(app["args"])
    assert admin == b""
    changed = {}
    for item in app["deployments"]:
        bounds = item.get("autoscaling_config") or {
            "min_replicas": item.get("num_replicas"),
            "max_replicas": 0,
        }
        update = {"replicas": bounds["min_replicas"], "max_replicas": bounds["max_replicas"]}
        changed[item["name"]] = getattr(config, item["name"]).model_copy(update=update)
    return config.model_copy(update=changed)


def labels_match(selector: dict[str, str], template: dict[str, Any]) -> bool:
    return selector.items() <= template["metadata"]["labels"].items()


# --- the chart as a whole ------------------------------------------------------------------------------------


def test_helm_finds_nothing_to_say(helm: Helm) -> None:
    """Its linter renders everything as well; 1 is "an icon is recommended"."""
    result = helm.lint()

    assert not result["Errors"]
    assert max(message["Severity"] for message in result["Messages"]) <= 1


def test_the_schema_is_made_from_the_configuration() -> None:
    """`python helm/make_schema.py` writes it; ranges and fields are said once, in cluster/config.py."""
    made = runpy.run_path(str(ROOT / "helm" / "make_schema.py"))

    assert (CHART / "values.schema.json").read_text() == made["text"]()


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()

    assert f'version = "{chart["appVersion"]}"' in project
    assert chart["version"] == chart["appVersion"]


@pytest.mark.parametrize("which", ["default", "everything"])
def test_kubernetes_and_kuberay_take_every_object(which: str, request: pytest.FixtureRequest) -> None:
    """Core kinds by Kubernetes' own schemas, strictly; RayService by KubeRay's definition, unknown fields refused."""
    release: Release = request.getfixturevalue(which)

    wrong = {(o["kind"], o["metadata"]["name"]): complaints(o) for o in release.objects}

    assert {key: found for key, found in wrong.items() if found} == {}


def test_a_wrong_object_is_noticed(default: Release) -> None:
    """The negative control of the test above: misspelt, of the wrong type, missing, and a core kind."""
    for change in ("typo", "type", "missing"):
        found = copy.deepcopy(default.service)
        group = found["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
        if change == "typo":
            found["spec"]["serveConfigv2"] = ""
        elif change == "type":
            group["replicas"] = "two"
        else:
            del group["template"]
        assert complaints(found), change
    service = copy.deepcopy(default.one("Service"))
    service["spec"]["ports"][0]["port"] = "http"
    assert complaints(service)


@pytest.mark.parametrize("which", ["default", "everything"])
def test_kuberays_own_rules_hold(which: str, request: pytest.FixtureRequest) -> None:
    """What its controller checks beyond the schema, read in its source: names, bounds, restart policies, resources."""
    release: Release = request.getfixturevalue(which)
    spec = release.service["spec"]
    cluster = spec["rayClusterConfig"]

    assert len(release.service["metadata"]["name"]) <= 47
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0)
    assert spec["upgradeStrategy"]["type"] in ("NewCluster", "None")
    for group in cluster["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert not {"resources", "num-cpus", "num-gpus", "memory"} & group["rayStartParams"].keys()
        assert "restartPolicy" not in group["template"]["spec"]
        assert group["template"]["spec"]["containers"][0]["name"].startswith("ray-")


def test_long_release_names_are_cut(rendered: Render) -> None:
    release = rendered({"fullnameOverride": "a" * 46 + "-" + "b" * 30})

    assert release.service["metadata"]["name"] == "a" * 46


# --- one configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["default", "everything"])
def test_the_values_are_paceline_s_configuration(which: str, request: pytest.FixtureRequest) -> None:
    """Without the pods, and but for the keys file, the tree that the cluster reads is the one that was written."""
    release: Release = request.getfixturevalue(which)
    given = copy.deepcopy(VALUES)
    if which == "everything":
        from_file = yaml.safe_load((Path(__file__).parent / "data" / "everything.yaml").read_text())
        for name in ClusterConfig.model_fields:
            given[name] = {**given[name], **from_file.get(name, {})}
    tree = {name: given[name] for name in ("preset", *ClusterConfig.model_fields)}
    for section in ClusterConfig.model_fields:
        tree[section] = {field: value for field, value in tree[section].items() if field != "pod"}
    tree["gateway"]["keys_file"] = "/etc/paceline/keys/keys.json"

    wanted = check_config(tree)
    assert config_of(release) == wanted.model_copy(update={"scaling": ScalingConfig()})
    # How many there are, or between how many, is what `paceline deploy` would say, `scaling` included.
    (ours,) = serve_config(wanted)["applications"]
    assert release.serve_config["applications"][0]["deployments"] == ours["deployments"]


def test_serve_takes_the_file(default: Release) -> None:
    """By Ray Serve's own schema of what `serve deploy` and KubeRay send."""
    from ray.serve.schema import ServeDeploySchema

    checked = ServeDeploySchema.model_validate(default.serve_config)

    assert checked.proxy_location == "Disabled"
    assert [d.name for d in checked.applications[0].deployments] == ["prefill", "decode", "draft"]


def test_pods_and_secrets_are_no_part_of_it(everything: Release) -> None:
    text = everything.service["spec"]["serveConfigV2"]

    assert "pod:" not in text and "nvidia" not in text and "my-" not in text


@pytest.mark.parametrize("which", ["default", "everything"])
def test_every_worker_finds_the_room_it_asks_for(which: str, request: pytest.FixtureRequest) -> None:
    """Each role's pods offer the resource that its configuration asks for, for all of its replicas."""
    release: Release = request.getfixturevalue(which)
    config = config_of(release)
    groups = release.groups
    head = release.service["spec"]["rayClusterConfig"]["headGroupSpec"]["resources"]

    for role in ("prefill", "decode", "draft", "gateway", *(["trainer"] if config.has_trainer else [])):
        section = getattr(config, role)
        if section.replicas == 0:
            assert role not in groups
            continue
        group = groups[role]
        for name, amount in section.resources.items():
            each = float(group["resources"][name])
            assert each * group["replicas"] >= amount * section.replicas * getattr(section, "tp", 1)
    for section in (config.router, config.control):
        assert all(float(head[name]) >= amount for name, amount in section.resources.items())


def test_gpus_follow_from_the_configuration(everything: Release) -> None:
    limits = {
        role: pod["spec"]["containers"][0]["resources"].get("limits", {})
        for role, pod in everything.pods.items()
    }

    assert limits["decode"]["nvidia.com/gpu"] == 4  # two replicas of two ranks of one GPU each
    assert limits["draft"]["nvidia.com/gpu"] == 2  # three of a half
    assert limits["trainer"]["amd.com/gpu"] == 1
    assert "nvidia.com/gpu" not in limits["gateway"] and "nvidia.com/gpu" not in limits["head"]
    assert limits["decode"]["memory"] == "64Gi"


def test_pods_follow_from_replicas(everything: Release, default: Release) -> None:
    bounds = {
        name: (g["minReplicas"], g["replicas"], g["maxReplicas"]) for name, g in everything.groups.items()
    }

    assert bounds["decode"] == (2, math.ceil(5 / 2), 6)
    assert bounds["gateway"] == (3, 3, 3)
    assert bounds["draft"] == (0, 1, 4)
    assert everything.service["spec"]["rayClusterConfig"]["autoscalerOptions"]["version"] == "v2"
    assert all(g["minReplicas"] == g["maxReplicas"] == 1 for g in default.groups.values())
    assert default.service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is False


def test_without_autoscaler_there_is_room_for_all_that_may_come(rendered: Render) -> None:
    """Serve's own scaling needs pods to scale into."""
    release = rendered({"decode": {"max_replicas": 3}, "draft": {"max_replicas": 4, "pod": {"replicas": 2}}})

    assert {role: release.groups[role]["replicas"] for role in ("prefill", "decode", "draft")} == {
        "prefill": 1,
        "decode": 3,
        "draft": 2,
    }


# --- pods -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["default", "everything"])
def test_no_pod_has_a_privilege(which: str, request: pytest.FixtureRequest) -> None:
    for pod in request.getfixturevalue(which).pods.values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
        assert spec["automountServiceAccountToken"] in (False, None) or which == "everything"
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert "limits" in container["resources"]


def test_a_role_s_pods_are_as_asked_for(everything: Release) -> None:
    decode, gateway = everything.pods["decode"]["spec"], everything.pods["gateway"]["spec"]

    assert decode["containers"][0]["image"].startswith("registry.example/paceline@sha256:0123")
    assert decode["nodeSelector"] == {"gpu": "h100"} and decode["runtimeClassName"] == "nvidia"
    assert decode["tolerations"][0]["key"] == "nvidia.com/gpu" and "nodeAffinity" in decode["affinity"]
    assert gateway["topologySpreadConstraints"][0]["maxSkew"] == 1 and "nodeSelector" not in gateway
    assert everything.pods["head"]["metadata"]["labels"]["team"] == "a"
    assert {"name": "MINE", "value": "x"} in everything.pods["head"]["spec"]["containers"][0]["env"]


def test_a_role_may_have_an_image_of_its_own(rendered: Render) -> None:
    release = rendered({"image": {"tag": "1"}, "decode": {"pod": {"image": {"tag": "1-cuda"}}}})
    images = {role: pod["spec"]["containers"][0]["image"] for role, pod in release.pods.items()}

    assert images["decode"] == "paceline:1-cuda" and images["draft"] == "paceline:1"


def test_probes_ask_what_is_there(default: Release) -> None:
    """KubeRay would ask workers for Serve's proxy, which does not run, unless they have a probe of their own."""
    probes = {role: pod["spec"]["containers"][0].get("readinessProbe") for role, pod in default.pods.items()}

    assert probes.pop("head") is None  # KubeRay's suits it
    assert probes.pop("gateway")["httpGet"] == {"path": "/ready", "port": "http"}
    assert all(probe["httpGet"]["path"] == "/api/healthz" for probe in probes.values())


def test_a_pod_that_ends_lets_its_streams_end(everything: Release) -> None:
    """The grace covers the drain, the drain is the configuration's, and the old cluster is kept for as long."""
    for role, pod in everything.pods.items():
        command = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        if role == "gateway":
            assert command[2:] == ["paceline.deploy.linger", "8000", "90", "6"] and grace_s >= 90 + 8
        elif role == "head":
            assert command == ["sleep", "90"] and grace_s >= 90 + 8
        else:  # a replacement may take a minute to come, and only then is the worker told to end
            assert command == ["paceline", "drain", "--limit-s", "150"] and grace_s >= 150 + 8
    assert everything.service["spec"]["rayClusterDeletionDelaySeconds"] == 90


def test_what_templates_repeat_is_the_preset_s(default: Release) -> None:
    """Seconds and ports that pods need, where the values do not say them."""
    gateway, control = config_of(default).gateway, config_of(default).control
    head, listener = (default.pods[role]["spec"] for role in ("head", "gateway"))

    assert listener["terminationGracePeriodSeconds"] == gateway.drain_s + 30
    assert listener["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-2:] == [
        f"{gateway.drain_s:g}",
        f"{gateway.notice_s:g}",
    ]
    assert {p["name"]: p["containerPort"] for p in listener["containers"][0]["ports"]} == {
        "http": gateway.port
    }
    assert head["containers"][0]["ports"][-1] == {"name": "control", "containerPort": control.port}


def test_models_come_from_one_place(everything: Release, rendered: Render) -> None:
    volume = rendered({"weights": {"create": True, "size": "1Ti"}, "model": {"target": "/weights/t"}})

    for role, pod in everything.pods.items():
        (init,) = pod["spec"]["initContainers"]
        assert "s3://bucket/models" in init["command"]
        assert ("--no-weights" in init["command"]) == (role in ("head", "gateway"))
        assert [s["secretRef"]["name"] for s in init["envFrom"]] == ["pg", "bucket"]
    assert volume.one("PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"] == "1Ti"
    for pod in volume.pods.values():
        assert "initContainers" not in pod["spec"]
        claims = [v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["spec"]["volumes"]]
        assert "paceline-weights" in claims


def test_learning_has_a_volume_that_all_see(everything: Release) -> None:
    for pod in everything.pods.values():
        assert {"name": "state", "mountPath": "/state"} in pod["spec"]["containers"][0]["volumeMounts"]
    claim = everything.one("PersistentVolumeClaim", "-state")
    assert claim["spec"]["storageClassName"] == "fast" and claim["spec"]["accessModes"] == ["ReadWriteMany"]


# --- secrets --------------------------------------------------------------------------------------------------


def test_the_first_key_opens_the_gateway(
    default: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the chart makes is what `paceline keys` makes: the gateway's own check says so."""
    made = {name: base64.b64decode(text) for name, text in default.one("Secret", "-keys")["data"].items()}
    (tmp_path / "keys.json").write_bytes(made["keys.json"])
    store = KeyFile(tmp_path / "keys.json")
    admin = base64.b64decode(default.one("Secret", "-admin")["data"]["admin-key"]).decode()
    monkeypatch.setenv(VARIABLE, admin)

    found = store.find(made["key"].decode())

    assert (
        found is not None and found.name == "first" and store.find("pl_" + "0" * 12 + "_" + "a" * 43) is None
    )
    assert made["key"].decode() not in made["keys.json"].decode()
    assert read_admin_key(tmp_path / "none") == admin


def test_an_upgrade_keeps_the_secrets(helm: Helm) -> None:
    before, after = helm.install(), helm.upgrade({"decode": {"replicas": 2}})

    assert after.number == 2
    for ending in ("-keys", "-admin"):
        assert before.one("Secret", ending)["data"] == after.one("Secret", ending)["data"]
    assert helm.kube.named("secrets").keys() == {"paceline-keys", "paceline-admin"}


def test_a_new_release_has_secrets_of_its_own(helm: Helm) -> None:
    one, other = helm.install(name="paceline"), helm.install(name="other")

    assert one.one("Secret", "-admin")["data"] != other.one("Secret", "-admin")["data"]


def test_uninstalling_keeps_what_cannot_be_made_again(helm: Helm) -> None:
    helm.install({"weights": {"create": True}, "model": {"target": "/weights/t"}})

    helm.uninstall()

    assert helm.kube.named("rayservices") == {} and helm.kube.named("services") == {}
    assert helm.kube.named("secrets").keys() == {"paceline-keys", "paceline-admin"}
    assert helm.kube.named("persistentvolumeclaims").keys() == {"paceline-weights"}


def test_secrets_of_your_own_are_used(everything: Release) -> None:
    head, gateway = everything.pods["head"]["spec"], everything.pods["gateway"]["spec"]
    admin = next(e for e in head["containers"][0]["env"] if e["name"] == VARIABLE)

    assert everything.all("Secret") == {}
    assert admin["valueFrom"]["secretKeyRef"] == {"name": "my-admin", "key": "admin-key"}
    assert {v.get("secret", {}).get("secretName") for v in gateway["volumes"]} >= {"my-keys"}
    assert [s["secretRef"]["name"] for s in gateway["containers"][0]["envFrom"]] == ["pg", "bucket"]


def test_only_the_head_has_the_admin_key(default: Release) -> None:
    having = {
        role
        for role, pod in default.pods.items()
        if any(e["name"] == VARIABLE for e in pod["spec"]["containers"][0]["env"])
    }

    assert having == {"head"}


# --- the ways in ----------------------------------------------------------------------------------------------


def test_clients_reach_gateways_only(default: Release, everything: Release) -> None:
    selector = default.one("Service")["spec"]["selector"]

    assert [role for role, pod in default.pods.items() if labels_match(selector, pod)] == ["gateway"]
    assert default.one("Service")["spec"]["type"] == "ClusterIP"
    rule = everything.one("Ingress")["spec"]["rules"][0]
    assert rule["host"] == "llm.example"
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == "paceline-gateway"
    assert everything.one("Ingress")["spec"]["tls"][0]["secretName"] == "cert"


def test_ray_s_own_ports_are_closed(default: Release) -> None:
    """From outside the release: the gateway's port for clients, the dashboard's for KubeRay's operator, no other."""
    policies = default.all("NetworkPolicy")
    every = policies["paceline"]["spec"]
    inside = every["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    ways_in = [
        (policy["spec"]["podSelector"]["matchLabels"].get("paceline/role"), port["port"], rule.get("from"))
        for policy in policies.values()
        for rule in policy["spec"]["ingress"]
        for port in rule.get("ports", [])
    ]

    assert all(labels_match(every["podSelector"]["matchLabels"], pod) for pod in default.pods.values())
    assert all(labels_match(inside, pod) for pod in default.pods.values())
    assert sorted(ways_in, key=str) == sorted(
        [("gateway", "http", None), ("head", "dashboard", [VALUES["networkPolicy"]["kuberay"]])], key=str
    )


def test_control_is_for_those_who_are_named(everything: Release) -> None:
    rules = everything.all("NetworkPolicy")["paceline-head"]["spec"]["ingress"]
    gateway = everything.all("NetworkPolicy")["paceline-gateway"]["spec"]["ingress"]

    assert rules[1]["ports"][0]["port"] == "control"
    assert rules[1]["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "monitoring"
    }
    assert gateway[0]["from"] == [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}]


def test_prometheus_shows_the_admin_key(everything: Release, default: Release) -> None:
    """Off loopback Control's /metrics wants it as well."""
    monitor = everything.one("PodMonitor")["spec"]
    ports = {p["name"] for p in everything.pods["head"]["spec"]["containers"][0]["ports"]}

    assert labels_match(monitor["selector"]["matchLabels"], everything.pods["head"])
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in ports and endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["credentials"] == {"name": "my-admin", "key": "admin-key"}
    assert default.all("PodMonitor") == {}


def test_alerts_and_dashboard_are_those_of_the_repository(everything: Release, default: Release) -> None:
    """Whole and unchanged: braces in them are not Helm's. Whoever does not ask for them needs no operator."""
    rule = everything.one("PrometheusRule")
    board = everything.one("ConfigMap", "-dashboard")

    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/paceline.rules.yaml").read_text())
    assert "{{ $labels.kind }}" in json.dumps(rule["spec"])
    assert json.loads(board["data"]["paceline.json"]) == json.loads(
        (ROOT / "deploy/grafana/paceline.json").read_text()
    )
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert default.all("PrometheusRule") == {}
    assert not any(name.endswith("-dashboard") for name in default.all("ConfigMap"))


def test_traces_go_where_the_values_say(rendered: Render) -> None:
    release = rendered(nested("telemetry.otlp_endpoint", "http://collector:4318"))

    assert config_of(release).telemetry.otlp_endpoint == "http://collector:4318"


def test_every_role_has_a_disruption_budget(everything: Release) -> None:
    budgets = everything.all("PodDisruptionBudget")

    for role, pod in everything.pods.items():
        budget = budgets[f"paceline-{role}"]["spec"]
        assert labels_match(budget["selector"]["matchLabels"], pod)
        assert budget["maxUnavailable"] == (0 if role == "head" else "25%")
    assert len(budgets) == len(everything.pods)


# --- changes --------------------------------------------------------------------------------------------------


def test_another_number_of_replicas_restarts_nothing(rendered: Render, default: Release) -> None:
    """Serve restarts replicas whose arguments change: only what it counts may differ."""
    more = rendered({"decode": {"replicas": 3}})
    one, two = default.serve_config["applications"][0], more.serve_config["applications"][0]

    assert one["args"] == two["args"] and one["deployments"] != two["deployments"]
    assert more.groups["decode"]["replicas"] == 3
    for role in default.pods:
        assert default.pods[role] == more.pods[role]


def test_a_change_of_the_configuration_changes_no_pod(rendered: Render, default: Release) -> None:
    """KubeRay would make a second cluster."""
    other = rendered({"speculation": {"depth": 4}})

    assert other.serve_config != default.serve_config
    assert other.service["spec"]["rayClusterConfig"] == default.service["spec"]["rayClusterConfig"]


def test_notes_say_the_next_command(default: Release, everything: Release) -> None:
    assert "kubectl -n default wait --for=condition=Ready rayservice/paceline" in default.notes
    assert "svc/paceline-gateway 8000:8000" in default.notes and "/v1/chat/completions" in default.notes
    assert (
        "get secret paceline-keys" in default.notes
        and "port-forward svc/paceline-head-svc 8001" in default.notes
    )
    assert "my-keys" in everything.notes and "upgrade.strategy=None" in everything.notes


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("decode.replicas", 0, "minimum: got 0, want 1"),
        ("decode.replicas", "two", "got string, want integer"),
        ("decode.replicas", 2000, "maximum: got 2,000, want 1,024"),
        ("decode.threads", 0, "minimum"),
        ("decode.replica", 2, "additional properties 'replica' not allowed"),
        ("prefill.num_gpus", -1, "minimum"),
        ("draft.kv_memory_mb", 1.5, "want integer"),
        ("speculation.depth", 99, "maximum: got 99, want 16"),
        ("speculation.control", "guess", "value must be one of 'fixed', 'measured'"),
        ("gateway.auth", "open", "value must be one of"),
        ("gateway.port", 70000, "maximum"),
        ("gateway.pod.tolerations", [{"key": "a", "effect": "Never"}], "value must be one of"),
        ("decode.pod.resources", {"limits": {"memory": "8 gigs"}}, "does not match pattern"),
        ("decode.pod.nodeSelector", {"gpu": True}, "got boolean, want string"),
        ("decode.pod.image.digest", "sha256:12", "does not match pattern"),
        ("decode.pod.replicas", 0, "minimum"),
        ("decode.pod.gpus", 1, "additional properties 'gpus' not allowed"),
        ("decode.pod.env", [{"value": "x"}], "missing property 'name'"),
        ("decodes.replicas", 2, "additional properties 'decodes' not allowed"),
        ("preset", "huge", "value must be one of"),
        ("image.pullPolicy", "Sometimes", "value must be one of"),
        ("rayVersion", "latest", "does not match pattern"),
        ("user", 0, "minimum: got 0, want 1"),
        ("secrets.keys", "My Keys", "does not match pattern"),
        ("weights.accessModes", ["ReadSometimes"], "value must be one of"),
        ("weights.url", "bucket/models", "does not match pattern"),
        ("service.type", "Public", "value must be one of"),
        ("metrics.interval", "often", "does not match pattern"),
        ("podDisruptionBudget.maxUnavailable", "many", "does not match pattern"),
        ("networkPolicy.clients", {"app": "a"}, "got object, want array"),
        ("upgrade.strategy", "NewClusterWithIncrementalUpgrade", "value must be one of 'NewCluster', 'None'"),
        ("learning.train.learning_rate", 2, "maximum"),
    ],
)
def test_the_schema_refuses_a_wrong_value(rendered: Render, path: str, value: Any, words: str) -> None:
    """By name and with what would be right, before anything is sent."""
    with pytest.raises(Exception, match="don't meet the specifications") as refused:
        rendered(nested(path, value))

    message = str(refused.value)
    assert words in message
    *place, leaf = path.split(".")
    assert f"/{'/'.join([*place, leaf])}" in message or leaf in message or place[0] in message


@pytest.mark.parametrize(
    "values, words",
    [
        ({"decode": {"pod": {"min": 5}}}, "decode.pod.min=5: expected at most decode.pod.max=4"),
        (
            {"autoscaler": {"enabled": True}, "decode": {"replicas": 9}},
            "decode.replicas=9: needs 9 pods, expected at most decode.pod.max=4",
        ),
        (
            {"autoscaler": {"enabled": True}, "decode": {"max_replicas": 9}},
            "decode.max_replicas=9: needs 9 pods, expected at most decode.pod.max=4",
        ),
        (
            {"draft": {"replicas": 3, "max_replicas": 2}},
            "draft.max_replicas=2: expected 0, or at least draft.re",
        ),
        ({"link": {"interface": "127.0.0.1"}}, "link.interface=127.0.0.1: expected node"),
        ({"link": {"interface": "0.0.0.0"}}, "link.interface=0.0.0.0"),
        ({"gateway": {"host": "127.0.0.1"}}, "gateway.host=127.0.0.1: expected an address that others reach"),
        ({"gateway": {"tls": {"cert": "/c", "key": "/k"}}}, "gateway.tls: expected nothing"),
        ({"control": {"tls": {"cert": "/c", "key": "/k"}}}, "control.tls: expected nothing"),
        ({"learning": {"enabled": True}}, "learning.storage: expected a URL"),
        ({"learning": {"enabled": True, "storage": "s3://b/f"}}, "learning.registry: expected postgresql://"),
        (
            {"learning": {"enabled": True, "storage": "/state/l", "registry": "sqlite:////state/r.db"}},
            "state.claim: expected a volume",
        ),
        ({"learning": {"registry": "postgresql://me:pw@db/x"}}, "learning.registry: expected no password"),
        ({"model": {"target": "/weights/t"}}, "model.target=/weights/t: expected weights.claim"),
        (
            {"weights": {"url": "s3://b/m", "claim": "c"}},
            "weights.url: expected nothing beside weights.claim",
        ),
        ({"ingress": {"enabled": True, "tlsSecret": "cert"}}, "ingress.host: expected"),
    ],
)
def test_values_that_do_not_go_together_are_refused(
    rendered: Render, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(Exception, match="install failed") as refused:
        rendered(values)

    assert words in str(refused.value)
    assert "pw@" not in str(refused.value)


def test_refusals_send_nothing(helm: Helm) -> None:
    with pytest.raises(Exception, match="don't meet"):
        helm.install(nested("decode.replicas", 0))

    assert helm.kube.objects == {}


def test_the_package_has_all_of_the_chart(helm: Helm, tmp_path: Path) -> None:
    """What `helm package` ships: templates, values, the schema, the notes."""
    import asyncio
    import tarfile

    import helm_sdkpy

    path = asyncio.run(helm_sdkpy.Package(helm._configuration).run(str(CHART), dest_dir=str(tmp_path)))

    with tarfile.open(path) as archive:
        names = {Path(name).relative_to("paceline").as_posix() for name in archive.getnames()}
    wanted = {p.relative_to(CHART).as_posix() for p in CHART.rglob("*") if p.is_file()}
    assert wanted - {".helmignore"} <= names
    assert json.loads((CHART / "values.schema.json").read_text())["additionalProperties"] is False
