"""Manifests for the operator KubeRay: Ray's head, and a group of its workers for each role."""

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from deploy.config import ClusterConfig, DecodeGroup, PrefillGroup, ProxyGroup, Role
from deploy.kubernetes.pods import (
    Json,
    Site,
    container_rights,
    metadata,
    mounted,
    placement,
    pod_labels,
    pod_rights,
    quantity,
    resources,
    secret_file,
    secret_name,
    selector,
    volumes,
)
from engine.errors import ConfigError
from serving.rpc.address import is_loopback

RAY_VERSION: Final = "2.60.0"
"""That of the extra `ray`; KubeRay asks for it where a token guards Ray."""
CLUSTER_FOLDER: Final = "/etc/tandem"
CLUSTER_FILE: Final = "cluster.yaml"
APPLICATION: Final = "deploy.serve_app:app"
SERVE_PORT: Final = 8000
AGENT_PORT: Final = 52365
HEAD_CPU: Final = "1"
HEAD_BYTES: Final = 4 << 30
NODES: Final[tuple[Role, ...]] = ("prefill", "decode")
ROLES: Final[tuple[Role, ...]] = ("proxy", *NODES)
AnyGroup = PrefillGroup | DecodeGroup | ProxyGroup


def cluster_manifests(config: ClusterConfig, site: Site) -> Iterator[Json]:
    """A RayCluster for `tandem up --address`, and a Service for the proxies in it."""
    port = _check_proxies(config)
    for role in ROLES:
        # By the group of its pod the Service finds a proxy, and a member its machine.
        if not config.group(role).labels:
            raise ConfigError(
                f"{role}.labels: give one, as {{tandem-role: {role}}}, so that Ray puts these "
                "members into the pods that are made for them"
            )
    yield {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": metadata(config, "ray"),
        "spec": _ray_cluster(config, site, serves=False),
    }
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(config, "proxy", "proxy"),
        "spec": {
            "selector": selector(config, "proxy"),
            "ports": [{"name": "http", "port": port, "targetPort": port}],
        },
    }


def service_manifests(config: ClusterConfig, site: Site) -> Iterator[Json]:
    """A RayService, which makes its own RayCluster and Service."""
    applications = [{"name": config.name, "import_path": APPLICATION, "route_prefix": "/"}]
    yield {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata(config, "serve"),
        "spec": {
            "serveConfigV2": msgspec.yaml.encode({"applications": applications}).decode(),
            "rayClusterConfig": _ray_cluster(config, site, serves=True),
        },
    }


def _check_proxies(config: ClusterConfig) -> int:
    """The port of the proxies, which a Service must reach."""
    proxy = config.proxy_config()
    if is_loopback(proxy.host) or not proxy.port:
        raise ConfigError(
            f"proxy.config: no Service reaches host {proxy.host} and port {proxy.port}: write "
            "host 0.0.0.0 and a port"
        )
    return proxy.port


def cluster_secret(config: ClusterConfig) -> str:
    """The Secret with the cluster file, which may hold keys."""
    return f"{config.name}-cluster"


def _ray_cluster(config: ClusterConfig, site: Site, *, serves: bool) -> Json:
    for role in NODES:
        if is_loopback(config.node(role).host):
            raise ConfigError(f"{role}.config.host: other pods reach no loopback: write host: auto")
    tolerance = {"gcsFaultToleranceOptions": _redis(config, site)} if site.redis_address else {}
    return {
        "rayVersion": RAY_VERSION,
        # The operator makes the token and gives it to all pods.
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        **tolerance,
        "headGroupSpec": _head(config, site, serves=serves),
        "workerGroupSpecs": [_workers(config, site, role, serves=serves) for role in ROLES],
    }


def _redis(config: ClusterConfig, site: Site) -> Json:
    reference = {"name": secret_name(config), "key": "redis-password"}
    return {
        "redisAddress": site.redis_address,
        "redisPassword": {"valueFrom": {"secretKeyRef": reference}},
    }


def _head(config: ClusterConfig, site: Site, *, serves: bool) -> Json:
    # The operator tells a RayService's application to the dashboard, from another pod.
    dashboard = "0.0.0.0" if serves else "127.0.0.1"
    held = {"cpu": HEAD_CPU, "memory": str(HEAD_BYTES)}
    container = {
        "name": "ray-head",
        "image": site.image,
        "ports": [
            {"name": "gcs-server", "containerPort": 6379},
            {"name": "dashboard", "containerPort": 8265},
            {"name": "client", "containerPort": 10001},
        ],
        "resources": {"requests": held, "limits": {"memory": str(HEAD_BYTES)}},
    }
    return {
        "rayStartParams": {"dashboard-host": dashboard},
        # Members go to workers, which outlive the head where there is a Redis.
        "resources": {"CPU": "0"},
        # It keeps its service account, by which Ray's autoscaler asks for pods.
        "template": _template(config, site, "head", container=container),
    }


def _workers(config: ClusterConfig, site: Site, role: Role, *, serves: bool) -> Json:
    group = config.group(role)
    fewest, most = _bounds(group)
    container = {
        "name": "ray-worker",
        "image": site.image,
        "resources": resources(group, role),
        **({"readinessProbe": _probe(role)} if serves else {}),
    }
    template = _template(config, site, role, container=container)
    template["spec"] |= {
        "automountServiceAccountToken": False,
        **placement(group, selector(config, role)),
    }
    # One member fills a pod: Ray counts whole CPUs, and those of a part of one as one.
    held = {"CPU": str(max(1, math.ceil(group.num_cpus)))}
    if group.num_gpus:
        held["GPU"] = str(int(group.num_gpus))
    held |= {name: quantity(amount) for name, amount in group.resources.items()}
    return {
        "groupName": role,
        "replicas": min(max(fewest, group.replicas), most),
        "minReplicas": fewest,
        "maxReplicas": most,
        "rayStartParams": {},
        "resources": held,
        **({"labels": group.labels} if group.labels else {}),
        "template": template,
    }


def _bounds(group: AnyGroup) -> tuple[int, int]:
    """The fewest and the most pods of a group: a surge needs room for one more."""
    scaling = None if isinstance(group, ProxyGroup) else group.autoscaling
    fewest = group.replicas if scaling is None else scaling.min_replicas
    most = group.replicas if scaling is None else scaling.max_replicas
    return fewest, most + (1 if group.rolling_update == "surge" else 0)


def _probe(role: Role) -> Json:
    """Instead of KubeRay's own, which for a RayService runs wget, and asks all pods for a proxy."""
    serve = ("/-/healthz", SERVE_PORT)
    path, port = {"proxy": serve}.get(role, ("/api/healthz", AGENT_PORT))
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": 5, "timeoutSeconds": 5}


def _template(config: ClusterConfig, site: Site, role: str, *, container: Json) -> Json:
    cluster = secret_file("cluster", cluster_secret(config), CLUSTER_FILE)
    found = volumes(site, role)
    # KubeRay brings the shared memory of Ray's object store.
    del found["shm"]
    sources, mounts = mounted(found)
    mounts.append({"name": "cluster", "mountPath": CLUSTER_FOLDER, "readOnly": True})
    return {
        "metadata": {"labels": pod_labels(config, role)},
        "spec": {
            "securityContext": pod_rights(),
            "containers": [
                {
                    **container,
                    # As `deploy.session` does: members do not give way to Ray's own processes.
                    "env": [{"name": "RAY_worker_niceness", "value": "0"}],
                    # Ray writes beside /tmp, too.
                    "securityContext": container_rights(read_only=False),
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [*sources, cluster],
        },
    }
