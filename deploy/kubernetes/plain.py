"""Manifests without an operator: a Deployment for each role; nodes find all proxies by DNS."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, TypeVar

import msgspec

from deploy.config import ClusterConfig, DecodeGroup, Group, PrefillGroup, Role
from deploy.kubernetes.pods import (
    Json,
    Site,
    container_rights,
    metadata,
    mounted,
    placement,
    pod_labels,
    pod_rights,
    resources,
    secret_variable,
    selector,
    volumes,
)
from engine.errors import ConfigError
from serving.config import NodeConfig, ServerConfig

CONFIG_FOLDER: Final = "/etc/tandem"
CONFIG_FILE: Final = "options.yaml"
TOKEN_KEY: Final = "cluster-token"
API_KEY: Final = "api-key"
NODES: Final[tuple[Role, ...]] = ("prefill", "decode")
PORTS: Final[dict[Role, tuple[int, int]]] = {
    "proxy": (8000, 8001),
    "prefill": (8100, 8101),
    "decode": (8200, 8201),
}
"""HTTP and gRPC: every pod has an address of its own, so ports need not be free ones."""
# Where a Service leads to pods, endpoints are forgotten later than the pod gets its SIGTERM.
FORGET_S: Final[dict[Role, int]] = {"proxy": 5}
KILL_AFTER_S: Final = 10
START_S: Final = 1200
# Options with which the command line, or a variable from the Secret, wins.
GIVEN: Final = {
    *("model", "host", "port", "grpc_port", "advertise_host", "proxy"),
    *("cluster_token", "api_key"),
}
# Files of the machine that has the cluster file are not in pods.
FILES: Final = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "api_keys_file")

NodeGroup = TypeVar("NodeGroup", PrefillGroup, DecodeGroup)


@dataclass(frozen=True, slots=True)
class Server:
    """One role: its group, the options of its members and their command line."""

    role: Role
    group: Group
    options: ServerConfig
    arguments: list[str]

    @property
    def options_file(self) -> str:
        """YAML with all options that differ from their defaults, and no secret.

        Raises ConfigError for one that names a file.
        """
        default = msgspec.to_builtins(type(self.options)())
        told = msgspec.to_builtins(self.options)
        changed = {key: told[key] for key in told if told[key] != default[key] and key not in GIVEN}
        for name in FILES:
            if name in changed:
                raise ConfigError(
                    f"{self.role}.config.{name}: {changed[name]} is not in the pods: leave it out, "
                    "and patch the Deployment with the option and the volume"
                )
        return msgspec.yaml.encode(changed).decode()


def manifests(config: ClusterConfig, site: Site) -> Iterator[Json]:
    """All objects of a cluster. Raises ConfigError naming what pods cannot have."""
    yield _service(config, "proxy", {})
    # A proxy is ready once it has a decode node, and nodes must find it before.
    yield _service(
        config, "proxy-headless", {"clusterIP": "None", "publishNotReadyAddresses": True}
    )
    for server in _servers(config):
        role = server.role
        yield {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(config, role, role),
            "data": {CONFIG_FILE: server.options_file},
        }
        yield _deployment(config, site, server)
        yield {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(config, role, role),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(config, role)}},
        }


def _servers(config: ClusterConfig) -> Iterator[Server]:
    file = f"--config={CONFIG_FOLDER}/{CONFIG_FILE}"
    yield Server("proxy", config.proxy, config.proxy_config(), ["proxy", file, *_listen("proxy")])
    found = [
        "--advertise-host=$(POD_IP)",
        f"--proxy=http://{config.name}-proxy-headless:{PORTS['proxy'][0]}",
    ]
    # Others reach a pod, so that what a loopback address allows by itself has to be asked for.
    shared = msgspec.structs.replace(
        config,
        config={**config.config, "host": "0.0.0.0"},
        prefill=_without_host(config.prefill),
        decode=_without_host(config.decode),
    )
    for role in NODES:
        arguments = [role, config.model, file, *_listen(role), *found]
        options, group = shared.node(role), config.group(role)
        if (group.memory_bytes or math.inf) <= options.kv_cache_memory_bytes:
            raise ConfigError(
                f"{role}.memory_bytes: {group.memory_bytes} leaves no room beside an arena of "
                f"{options.kv_cache_memory_bytes}"
            )
        yield Server(role, group, options, arguments)


def _listen(role: Role) -> list[str]:
    http, grpc = PORTS[role]
    return ["--host=0.0.0.0", f"--port={http}", f"--grpc-port={grpc}"]


def _without_host(group: NodeGroup) -> NodeGroup:
    config = {name: value for name, value in group.config.items() if name != "host"}
    return msgspec.structs.replace(group, config=config)


def _service(config: ClusterConfig, name: str, fields: Json) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(config, name, "proxy"),
        "spec": {
            **fields,
            "selector": selector(config, "proxy"),
            "ports": [{"name": "http", "port": PORTS["proxy"][0], "targetPort": "http"}],
        },
    }


def _deployment(config: ClusterConfig, site: Site, server: Server) -> Json:
    role, group = server.role, server.group
    chosen = selector(config, role)
    surge = {"surge": (1, 0), "drain_first": (0, 1)}[group.rolling_update]
    # Pods follow their options: another digest is another template.
    digest = sha256(server.options_file.encode()).hexdigest()
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(config, role, role),
        "spec": {
            "replicas": group.replicas,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": surge[0], "maxUnavailable": surge[1]},
            },
            "selector": {"matchLabels": chosen},
            "template": {
                "metadata": {
                    "labels": pod_labels(config, role),
                    "annotations": {
                        "tandem/options-digest": digest,
                        "prometheus.io/scrape": "true",
                        "prometheus.io/port": str(PORTS[role][0]),
                    },
                },
                "spec": _pod(config, site, server),
            },
        },
    }


def _pod(config: ClusterConfig, site: Site, server: Server) -> Json:
    role = server.role
    options: Json = {"configMap": {"name": f"{config.name}-{role}"}}
    found = {**volumes(site, role), "options": (CONFIG_FOLDER, options), **_tiers(server.options)}
    sources, mounts = mounted(found)
    forget = FORGET_S.get(role, 0)
    sleep = {"lifecycle": {"preStop": {"exec": {"command": ["sleep", str(forget)]}}}}
    container = {
        "name": "tandem",
        "image": site.image,
        "args": server.arguments,
        "env": _variables(config, server.options),
        "ports": [
            {"name": kind, "containerPort": port}
            for kind, port in zip(("http", "grpc"), PORTS[role], strict=True)
        ],
        # Weights are read before a node answers at all.
        "startupProbe": _probe("/live", period_s=5, failures=START_S // 5),
        "livenessProbe": _probe("/live", period_s=10, failures=6),
        "readinessProbe": _probe("/ready", period_s=2, failures=2),
        **(sleep if forget else {}),
        "resources": resources(server.group, role),
        "securityContext": container_rights(read_only=True),
        "volumeMounts": mounts,
    }
    machines = {"nodeSelector": server.group.labels} if server.group.labels else {}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_rights(),
        # SIGTERM drains; what is left ends with an error before the kill.
        "terminationGracePeriodSeconds": math.ceil(
            forget + server.options.drain_timeout + KILL_AFTER_S
        ),
        **machines,
        **placement(server.group, selector(config, role)),
        "containers": [container],
        "volumes": sources,
    }


def _variables(config: ClusterConfig, options: ServerConfig) -> list[Json]:
    # A key that the file gives must be there; a proxy takes one from the Secret in any case.
    wanted = options.api_key is not None
    key = [secret_variable(config, "VLLM_API_KEY", API_KEY, optional=not wanted)]
    return [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        secret_variable(config, "TANDEM_CLUSTER_TOKEN", TOKEN_KEY),
        *(key if wanted or not isinstance(options, NodeConfig) else []),
    ]


def _tiers(options: ServerConfig) -> dict[str, tuple[str, Json]]:
    """A disk of its own for the folder of a node's tier, which goes when the pod goes."""
    if not isinstance(options, NodeConfig):
        return {}
    paths = _disk_paths(options.kv_transfer_config.kv_connector_extra_config)
    return {f"tier-{place}": (path, {"emptyDir": {}}) for place, path in enumerate(paths)}


def _disk_paths(value: object) -> Iterator[str]:
    """Folders in a connector's options; those of a MultiConnector have options of others inside."""
    if isinstance(value, dict):
        if isinstance(path := value.get("disk_path"), str):
            yield path
        value = [*value.values()]
    for item in value if isinstance(value, list) else ():
        yield from _disk_paths(item)


def _probe(path: str, *, period_s: int, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
