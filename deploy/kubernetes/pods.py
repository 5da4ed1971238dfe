"""Parts of pods that both forms of manifests have: names, labels, volumes, rights, resources."""

import re
from dataclasses import dataclass
from typing import Any, Final

from deploy.config import ClusterConfig, Group
from engine.distribution import VERSION
from engine.errors import ConfigError

Json = dict[str, Any]

MODELS: Final = "/models"
CACHE: Final = "/cache"
IMAGE: Final = f"tandem:{VERSION}"
USER: Final = 10001
HOST_LABEL: Final = "kubernetes.io/hostname"
GPU: Final = "nvidia.com/gpu"
# llm-d's schedulers find nodes by it.
LLM_D_LABELS: Final[dict[str, Json]] = {
    "prefill": {"llm-d.ai/role": "prefill"},
    "decode": {"llm-d.ai/role": "decode"},
}
# Room for the longest suffix that a name gets here and from KubeRay, within the 63 of a label.
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Site:
    """A Kubernetes cluster, as far as a cluster file does not tell of it.

    `model_claim`: a PersistentVolumeClaim, mounted at /models. `redis_address`: HOST:PORT, for
    Ray's head.
    """

    image: str = IMAGE
    model_claim: str | None = None
    redis_address: str | None = None


def check_cluster(config: ClusterConfig, site: Site) -> None:
    """Raises ConfigError for a name or a model that pods cannot have."""
    if not _NAME.fullmatch(config.name):
        raise ConfigError(
            f"name: {config.name!r} is no name on Kubernetes: at most 32 small letters, digits "
            "and -, a letter first"
        )
    if config.model.startswith("/"):
        if not re.fullmatch(rf"{MODELS}/[^/]+", config.model):
            raise ConfigError(
                f"model: {config.model} is not in the pods: write {MODELS}/NAME, a folder of the "
                "--model-claim, or a hub name"
            )
        if site.model_claim is None:
            raise ConfigError(f"model: {config.model} needs --model-claim, which holds the folder")


def metadata(config: ClusterConfig, name: str, role: str = "cluster") -> Json:
    """Name and labels of one object of the cluster."""
    return {
        "name": f"{config.name}-{name}",
        "labels": {**selector(config, role), "app.kubernetes.io/version": VERSION},
    }


def selector(config: ClusterConfig, role: str) -> Json:
    """Labels by which the pods of a role are found; they never change."""
    return {
        "app.kubernetes.io/name": "tandem",
        "app.kubernetes.io/instance": config.name,
        "app.kubernetes.io/component": role,
    }


def pod_labels(config: ClusterConfig, role: str) -> Json:
    """All labels of a pod."""
    return {**selector(config, role), **LLM_D_LABELS.get(role, {})}


def secret_name(config: ClusterConfig) -> str:
    """The Secret that the user makes; manifests only name it."""
    return f"{config.name}-secret"


def secret_variable(config: ClusterConfig, name: str, key: str, *, optional: bool = False) -> Json:
    """An environment variable with the value of a key of the Secret."""
    reference = {"name": secret_name(config), "key": key, "optional": optional}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def secret_file(name: str, secret: str, key: str) -> Json:
    """A volume with one key of a Secret as a file of that name."""
    return {"name": name, "secret": {"secretName": secret, "items": [{"key": key, "path": key}]}}


def volumes(site: Site, role: str) -> dict[str, tuple[str, Json]]:
    """Path and source of each volume by name: the folders that are written to, and the models."""
    scratch: Json = {"emptyDir": {}}
    # An arena is a memory file without a name, and needs none of this. Transports do.
    shared: Json = {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    found = {"tmp": ("/tmp", scratch), "cache": (CACHE, scratch), "shm": ("/dev/shm", shared)}
    # Proxies get tokenizer and template from nodes.
    if site.model_claim is not None and LLM_D_LABELS.get(role):
        claim = {"claimName": site.model_claim, "readOnly": True}
        found["models"] = (MODELS, {"persistentVolumeClaim": claim})
    return found


def mounted(found: dict[str, tuple[str, Json]]) -> tuple[list[Json], list[Json]]:
    """`volumes` of a pod, and `volumeMounts` of its container."""
    return (
        [{"name": name, **source} for name, (_, source) in found.items()],
        [{"name": name, "mountPath": path} for name, (path, _) in found.items()],
    )


def pod_rights() -> Json:
    """`securityContext` of a pod: the image's user, who is not root."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_rights(*, read_only: bool) -> Json:
    """`securityContext` of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": read_only,
        "capabilities": {"drop": ["ALL"]},
    }


def resources(group: Group, role: str) -> Json:
    """`resources` of a container. CPUs are asked for and not bounded: a bound only slows."""
    if group.num_gpus != int(group.num_gpus):
        raise ConfigError(
            f"{role}.num_gpus: {group.num_gpus:g} is no whole number, and pods share no GPU"
        )
    both: Json = {} if group.memory_bytes is None else {"memory": str(group.memory_bytes)}
    if group.num_gpus:
        both[GPU] = str(int(group.num_gpus))
    # Other resources of a cluster file are Ray's; with a slash they are those of a device plugin.
    both |= {name: quantity(amount) for name, amount in group.resources.items() if "/" in name}
    return {"requests": {"cpu": f"{group.num_cpus * 1000:.0f}m", **both}, "limits": both}


def quantity(amount: float) -> str:
    """A number as Kubernetes takes it, which counts devices in whole ones."""
    return str(int(amount) if amount == int(amount) else amount)


def placement(group: Group, chosen: Json) -> Json:
    """Fields of a pod that say on which machines the pods of a group, `chosen` by labels, go."""
    near = {"topologyKey": HOST_LABEL, "labelSelector": {"matchLabels": chosen}}
    spread = {"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", **near}
    rules: dict[str, Json] = {
        "SPREAD": {"topologySpreadConstraints": [spread]},
        "STRICT_SPREAD": {
            "affinity": {
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}
            }
        },
        "PACK": {
            "affinity": {
                "podAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {"weight": 100, "podAffinityTerm": near}
                    ]
                }
            }
        },
    }
    return rules[group.strategy]
