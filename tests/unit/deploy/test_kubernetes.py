"""Manifests: their fields are Kubernetes', their parts meet, and their commands start."""

import copy
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from deploy.config import DEMO_CLUSTER, ClusterConfig, load_cluster
from deploy.kubernetes.kuberay import APPLICATION, RAY_VERSION
from deploy.kubernetes.plain import GIVEN, PORTS
from deploy.kubernetes.pods import Site
from deploy.kubernetes.render import FORMS, Form, render
from engine.errors import ConfigError
from proxy.config import ProxyConfig
from serving.config import NodeConfig, ServerConfig
from tests.source_tree import ROOT
from tests.support.deploy.command_lines import config_of
from tests.support.deploy.kubernetes_fields import TYPES, problems

Json = dict[str, Any]
FOLDER = DEMO_CLUSTER.parent
ON_RAY = ("gpu_hosts", "two_hosts")
SITE = Site(image="registry/tandem:1", model_claim="models", redis_address="redis:6379")
POD_IP = "10.0.0.7"


def example(name: str) -> ClusterConfig:
    """One of deploy/configs; those that serve the demo's model would take it from a hub."""
    config = load_cluster(FOLDER / f"{name}.yaml")
    return config if config.model.startswith("/models/") else with_model(config)


def with_model(config: ClusterConfig) -> ClusterConfig:
    return msgspec.structs.replace(config, model="org/model")


def cluster(tmp_path: Path, **fields: Any) -> ClusterConfig:
    file = tmp_path / "cluster.yaml"
    file.write_bytes(msgspec.yaml.encode({"model": "org/model", **fields}))
    return load_cluster(file)


def every_manifest() -> Iterator[Json]:
    for file in sorted(FOLDER.glob("*.yaml")):
        yield from render(example(file.stem), "plain", SITE)
    packed = msgspec.structs.replace(example("two_hosts"), name="packed")
    packed = msgspec.structs.replace(
        packed, proxy=msgspec.structs.replace(packed.proxy, strategy="PACK")
    )
    for config in (*map(example, ON_RAY), packed):
        yield from render(config, "ray", SITE)
        yield from render(config, "ray-service", SITE)


def one(manifests: list[Json], kind: str, name: str) -> Json:
    """The manifest of that kind whose name ends so."""
    (found,) = (
        it for it in manifests if it["kind"] == kind and it["metadata"]["name"].endswith(name)
    )
    return found


def pod_of(manifests: list[Json], role: str) -> Json:
    pod: Json = one(manifests, "Deployment", f"-{role}")["spec"]["template"]["spec"]
    return pod


def found_in(manifest: Json) -> list[str]:
    return list(problems(manifest, manifest["kind"], manifest["kind"], set()))


def test_every_field_is_one_of_kubernetes_and_has_its_type() -> None:
    seen: set[tuple[str, str]] = set()
    wrong = [
        problem
        for manifest in every_manifest()
        for problem in problems(manifest, manifest["kind"], manifest["kind"], seen)
    ]
    assert wrong == []
    # The table has nothing that nobody renders.
    assert seen == {(kind, name) for kind, fields in TYPES.items() for name in fields}


def test_a_typo_would_be_found() -> None:
    deployment = one(render(example("demo"), "plain", SITE), "Deployment", "-decode")
    assert found_in(deployment) == []
    typo = copy.deepcopy(deployment)
    typo["spec"]["replcias"] = typo["spec"].pop("replicas")
    assert found_in(typo) == ["Deployment.spec.replcias: DeploymentSpec has no such field"]
    typo = copy.deepcopy(deployment)
    typo["spec"]["replicas"] = "2"
    typo["spec"]["template"]["spec"]["containers"][0]["env"][0] = {}
    del typo["spec"]["selector"]
    typo["spec"]["strategy"]["type"] = "Rolling"
    assert found_in(typo) == [
        "Deployment.spec.selector: missing",
        "Deployment.spec.replicas: '2' is no integer",
        "Deployment.spec.strategy.type: 'Rolling' is none of RollingUpdate|Recreate",
        "Deployment.spec.template.spec.containers[0].env[0].name: missing",
    ]


def started(
    manifests: list[Json], role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ServerConfig:
    """The options with which the program in a pod starts."""
    options = tmp_path / f"{role}.yaml"
    options.write_text(one(manifests, "ConfigMap", f"-{role}")["data"]["options.yaml"])
    container = pod_of(manifests, role)["containers"][0]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "of a Secret"))
    words = [
        re.sub(r"^--config=.*", f"--config={options}", word).replace("$(POD_IP)", POD_IP)
        for word in container["args"]
    ]
    config = config_of(["tandem", *words], monkeypatch)
    assert config is not None
    return config


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", ["demo", "gpu_hosts", "shared_tiers"])
def test_pods_start_with_the_options_of_the_file_and_find_each_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = example(name)
    manifests = render(config, "plain", SITE)
    proxy = started(manifests, "proxy", tmp_path, monkeypatch)
    assert isinstance(proxy, ProxyConfig) and proxy.grpc_port
    headless = one(manifests, "Service", "-headless")
    assert headless["spec"]["clusterIP"] == "None"
    # A proxy is not ready before it has nodes.
    assert headless["spec"]["publishNotReadyAddresses"]
    for role in ("prefill", "decode"):
        node = started(manifests, role, tmp_path, monkeypatch)
        assert isinstance(node, NodeConfig)
        assert (node.model, node.advertise_host) == (config.model, POD_IP)
        assert node.proxy == (f"http://{headless['metadata']['name']}:{proxy.port}",)
        # Nobody but the pod reaches loopback, for which events are on by themselves.
        asked = "kv_events_config" in config.config
        assert node.kv_events_config.is_published == asked
        wanted = config.node(role)
        for field in set(node.__struct_fields__) - GIVEN - {"kv_events_config"}:
            assert getattr(node, field) == getattr(wanted, field), field
        ports = pod_of(manifests, role)["containers"][0]["ports"]
        assert [it["containerPort"] for it in ports] == [node.port, node.grpc_port]
        assert node.host == proxy.host == "0.0.0.0"


@pytest.mark.parametrize("name", ["demo", "gpu_hosts", "shared_tiers"])
def test_names_and_labels_lead_to_what_they_name(name: str) -> None:
    manifests = render(example(name), "plain", SITE)
    maps = {it["metadata"]["name"] for it in manifests if it["kind"] == "ConfigMap"}
    templates = [it["spec"]["template"] for it in manifests if it["kind"] == "Deployment"]
    labels = [it["metadata"]["labels"].items() for it in templates]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        chosen = spec.get("selector", {})
        chosen = chosen.get("matchLabels", chosen)
        if chosen:
            assert sum(chosen.items() <= it for it in labels) == 1, manifest["metadata"]["name"]
        for port in spec.get("ports", ()):
            assert port["targetPort"] == "http"
    for pod in (it["spec"] for it in templates):
        (container,) = pod["containers"]
        sources = {it["name"]: it for it in pod["volumes"]}
        assert sources.keys() == {it["name"] for it in container["volumeMounts"]}
        assert sources["options"]["configMap"]["name"] in maps
        named = {it["name"] for it in container["ports"]}
        probes = [container[f"{it}Probe"] for it in ("startup", "liveness", "readiness")]
        assert [it["httpGet"]["path"] for it in probes] == ["/live", "/live", "/ready"]
        assert {it["httpGet"]["port"] for it in probes} <= named
    roles = {dict(it).get("llm-d.ai/role") for it in labels}
    assert roles == {None, "prefill", "decode"}


def test_pods_have_what_the_group_takes_and_no_rights(tmp_path: Path) -> None:
    manifests = render(example("gpu_hosts"), "plain", SITE)
    pod = pod_of(manifests, "decode")
    (container,) = pod["containers"]
    both = {"memory": str(32 << 30), "nvidia.com/gpu": "1"}
    assert container["resources"] == {"requests": {"cpu": "4000m", **both}, "limits": both}
    assert container["image"] == SITE.image
    assert pod["nodeSelector"] == {"tandem-role": "decode"}
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    paths = {it["mountPath"] for it in container["volumeMounts"]}
    assert {"/tmp", "/cache", "/dev/shm", "/models"} <= paths
    memory = next(it for it in pod["volumes"] if it["name"] == "shm")["emptyDir"]
    assert memory == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert "models" not in {it["name"] for it in pod_of(manifests, "proxy")["volumes"]}
    # A tier's folder is written to, where the rest is not.
    mounts = pod_of(render(example("shared_tiers"), "plain", SITE), "prefill")["containers"][0]
    assert "/srv/kv" in {it["mountPath"] for it in mounts["volumeMounts"]}
    uid = pod["securityContext"]["runAsUser"]
    assert f"USER {uid}:{uid}\n" in (ROOT / "Dockerfile").read_text()
    rdma = cluster(tmp_path, decode={"resources": {"rdma/ib": 2e6, "of_ray": 1}})
    (container,) = pod_of(render(rdma, "plain", SITE), "decode")["containers"]
    assert container["resources"]["limits"] == {"rdma/ib": "2000000"}


def test_pods_drain_before_they_are_killed(tmp_path: Path) -> None:
    config = cluster(tmp_path, config={"drain_timeout": 100}, proxy={"rolling_update": "surge"})
    manifests = render(config, "plain", SITE)
    assert pod_of(manifests, "decode")["terminationGracePeriodSeconds"] > 100
    pod = pod_of(manifests, "proxy")
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = config.proxy_config().drain_timeout
    assert command[0] == "sleep"
    assert pod["terminationGracePeriodSeconds"] > drain_s + int(command[1])
    updates = {
        role: one(manifests, "Deployment", f"-{role}")["spec"]["strategy"]["rollingUpdate"]
        for role in ("prefill", "proxy")
    }
    assert all(it == {"maxSurge": 1, "maxUnavailable": 0} for it in updates.values())
    options = cluster(tmp_path, config={"max_num_seqs": 7})
    digests = {
        one(render(it, "plain", SITE), "Deployment", "-decode")["spec"]["template"]["metadata"][
            "annotations"
        ]["tandem/options-digest"]
        for it in (config, options, cluster(tmp_path, config={"max_num_seqs": 7}))
    }
    assert len(digests) == 2


@pytest.mark.parametrize("form", list(FORMS))
def test_no_secret_of_the_file_is_in_a_manifest(form: Form, tmp_path: Path) -> None:
    group = {"labels": {"a": "b"}}
    config = cluster(
        tmp_path,
        cluster_token="token-of-the-file",
        config={"host": "auto"},
        prefill=group,
        decode={**group, "config": {"api_key": "key-of-nodes"}},
        proxy={**group, "config": {"api_key": "key-of-proxies", "host": "0.0.0.0"}},
    )
    manifests = render(config, form, SITE)
    text = msgspec.yaml.encode(manifests).decode()
    assert not re.search("token-of-the-file|key-of-nodes|key-of-proxies", text)
    if form == "plain":
        token, key = ("TANDEM_CLUSTER_TOKEN", False), ("VLLM_API_KEY", False)
        assert secrets_of(manifests, "prefill") == [token]
        # A key that the file has must be in the Secret: without it all could ask.
        assert secrets_of(manifests, "decode") == [token, key]
        assert secrets_of(manifests, "proxy") == [token, key]
        plain = render(cluster(tmp_path), "plain", SITE)
        assert secrets_of(plain, "proxy") == [token, ("VLLM_API_KEY", True)]


def secrets_of(manifests: list[Json], role: str) -> list[tuple[str, bool]]:
    """Variables from the Secret, and whether they may be missing there."""
    variables = pod_of(manifests, role)["containers"][0]["env"]
    sources = {it["name"]: it["valueFrom"].get("secretKeyRef") for it in variables}
    given = {name: source for name, source in sources.items() if source}
    assert all(source["name"] == "tandem-secret" for source in given.values())
    return [(name, source["optional"]) for name, source in given.items()]


GROUP: Json = {"labels": {"tandem-role": "x"}}
OPEN: Json = {"config": {"host": "0.0.0.0"}, **GROUP}
REFUSED: list[tuple[Form, Json, str]] = [
    ("plain", {"name": "No_Name"}, "name: 'No_Name' is no name on Kubernetes"),
    ("plain", {"name": "x" * 33}, "is no name on Kubernetes"),
    ("plain", {"model": "/srv/model"}, "model: /srv/model is not in the pods: write /models/NAME"),
    ("plain", {"decode": {"num_gpus": 0.5}}, "decode.num_gpus: 0.5 is no whole number"),
    ("plain", {"decode": {"memory_bytes": 1 << 29}}, "leaves no room beside an arena of 536870912"),
    (
        "plain",
        {"proxy": {"config": {"api_keys_file": "keys.yaml"}}},
        "proxy.config.api_keys_file: keys.yaml is not in the pods",
    ),
    ("ray", {"config": {"host": "auto"}, "proxy": {"labels": {"a": "b"}}}, "no Service reaches"),
    ("ray", {"config": {"host": "auto"}, "proxy": OPEN}, "prefill.labels: give one"),
    (
        "ray",
        {"prefill": GROUP, "decode": GROUP, "proxy": OPEN},
        "prefill.config.host: other pods reach no loopback",
    ),
    ("ray-service", {}, "prefill.config.host: other pods reach no loopback"),
]


@pytest.mark.parametrize(("form", "fields", "words"), REFUSED, ids=[it[2] for it in REFUSED])
def test_what_pods_cannot_have_is_refused(
    form: Form, fields: Json, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        render(cluster(tmp_path, **fields), form, SITE)


def test_a_model_s_folder_needs_a_claim(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --model-claim"):
        render(cluster(tmp_path, model="/models/m"), "plain", Site())


def test_ray_is_guarded_and_has_a_group_of_pods_for_each_role() -> None:
    config = example("gpu_hosts")
    spec = one(render(config, "ray", SITE), "RayCluster", "-ray")["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["ray"] == [f"ray=={spec['rayVersion']}"] == [f"ray=={RAY_VERSION}"]
    head = spec["headGroupSpec"]
    assert head["rayStartParams"] == {"dashboard-host": "127.0.0.1"}
    assert head["resources"] == {"CPU": "0"}
    # Ray's autoscaler runs there and asks Kubernetes for pods.
    assert "automountServiceAccountToken" not in head["template"]["spec"]
    groups = {it["groupName"]: it for it in spec["workerGroupSpecs"]}
    for role, group in groups.items():
        assert group["labels"] == {"tandem-role": role}
        # KubeRay refuses resources that are told twice.
        assert group["rayStartParams"] == {}
        (container,) = group["template"]["spec"]["containers"]
        assert container["env"] == [{"name": "RAY_worker_niceness", "value": "0"}]
        assert group["template"]["spec"]["automountServiceAccountToken"] is False
    assert groups["decode"]["resources"] == {"CPU": "4", "GPU": "1"}
    bounds = {role: (it["minReplicas"], it["maxReplicas"]) for role, it in groups.items()}
    # A surge needs one more; a proxy drains first.
    assert bounds == {"proxy": (2, 2), "prefill": (4, 5), "decode": (2, 3)}
    assert spec["gcsFaultToleranceOptions"]["redisAddress"] == SITE.redis_address
    without = msgspec.structs.replace(config, name="a")
    spec = one(render(without, "ray", Site(model_claim="m")), "RayCluster", "-ray")["spec"]
    assert "gcsFaultToleranceOptions" not in spec


def test_ray_s_groups_grow_as_far_as_the_file_says(tmp_path: Path) -> None:
    scaling = {"min_replicas": 2, "max_replicas": 6}
    decode = {**GROUP, "num_cpus": 0.5, "autoscaling": scaling, "resources": {"big": 2}}
    config = cluster(tmp_path, config={"host": "auto"}, prefill=GROUP, decode=decode, proxy=OPEN)
    service = one(render(config, "ray-service", SITE), "RayService", "-serve")
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][2]
    told = {name: group[name] for name in ("groupName", "replicas", "minReplicas", "maxReplicas")}
    assert told == {"groupName": "decode", "replicas": 2, "minReplicas": 2, "maxReplicas": 7}
    assert group["resources"] == {"CPU": "1", "big": "2"}


def test_a_ray_service_names_the_application() -> None:
    service = one(render(example("two_hosts"), "ray-service", SITE), "RayService", "-serve")
    (application,) = msgspec.yaml.decode(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == APPLICATION == "deploy.serve_app:app"
    cluster_spec = service["spec"]["rayClusterConfig"]
    # The operator reaches the dashboard from its own pod.
    assert cluster_spec["headGroupSpec"]["rayStartParams"] == {"dashboard-host": "0.0.0.0"}
    probes = [
        it["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"]
        for it in cluster_spec["workerGroupSpecs"]
    ]
    assert probes == ["/-/healthz", "/api/healthz", "/api/healthz"]


def test_the_command_writes_what_is_rendered_and_names_what_is_wrong(tmp_path: Path) -> None:
    def run(file: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deploy", "render", "k8s", str(file), "--format", "plain"]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )

    config = cluster(tmp_path, prefill={"replicas": 3})
    done = run(tmp_path / "cluster.yaml")
    assert list(yaml.safe_load_all(done.stdout)) == render(config, "plain", Site()), done.stderr
    assert "&id" not in done.stdout
    failed = run(DEMO_CLUSTER)
    assert failed.returncode == 2 and failed.stderr.startswith(f"error: {DEMO_CLUSTER}:4: model: ")


def test_the_page_names_objects_keys_and_ports_that_there_are() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    config = msgspec.structs.replace(example("gpu_hosts"), name="tandem")
    manifests = [it for form in FORMS for it in render(config, form, SITE)]
    known = {f"{it['kind'].lower()}/{it['metadata']['name']}" for it in manifests}
    named = set(re.findall(r"\b(?:deployment|service)/[a-z-]+", page))
    assert len(named) > 3 and named <= known
    text = msgspec.yaml.encode(manifests).decode()
    secrets = re.findall(r"secret generic ([a-z-]+) --from-(?:literal|file)=([a-z.-]+)", page)
    assert len(secrets) == 2
    keys = {"redis-password", "api-key"} & set(re.findall(r"`([a-z-]+)`", page))
    for key in (*keys, *(word for pair in secrets for word in pair)):
        assert re.search(rf"[:/] {re.escape(key)}$", text, re.M), key
    assert len(keys) == 2 and "name: tandem-proxy-headless" in text
    ports = [pod_of(manifests, role)["containers"][0]["ports"] for role in PORTS]
    assert ", ".join(str(http["containerPort"]) for http, _ in ports) in page
