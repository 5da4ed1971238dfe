"""Fields of Kubernetes and KubeRay that manifests may have, and their types, as both publish them.

Only those that are rendered: Kubernetes' API reference (apps/v1, policy/v1, v1) and the CRDs of
`ray.io/v1` have many more.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

# A type is a name of this table, [one] in a list, words with |, or one of SCALARS.
TYPES: Final[dict[str, dict[str, str]]] = {
    "Service": {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": "ObjectMeta",
        "spec": "ServiceSpec",
    },
    "ServiceSpec": {
        "clusterIP": "string",
        "publishNotReadyAddresses": "boolean",
        "selector": "map",
        "ports": "[ServicePort]",
    },
    "ServicePort": {"name": "string", "port": "integer", "targetPort": "int-or-string"},
    "ConfigMap": {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": "ObjectMeta",
        "data": "map",
    },
    "PodDisruptionBudget": {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": "ObjectMeta",
        "spec": "PodDisruptionBudgetSpec",
    },
    "PodDisruptionBudgetSpec": {"maxUnavailable": "int-or-string", "selector": "LabelSelector"},
    "Deployment": {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": "ObjectMeta",
        "spec": "DeploymentSpec",
    },
    "DeploymentSpec": {
        "replicas": "integer",
        "strategy": "DeploymentStrategy",
        "selector": "LabelSelector",
        "template": "PodTemplateSpec",
    },
    "DeploymentStrategy": {
        "type": "RollingUpdate|Recreate",
        "rollingUpdate": "RollingUpdateDeployment",
    },
    "RollingUpdateDeployment": {"maxSurge": "int-or-string", "maxUnavailable": "int-or-string"},
    "RayCluster": {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": "ObjectMeta",
        "spec": "RayClusterSpec",
    },
    "RayService": {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": "ObjectMeta",
        "spec": "RayServiceSpec",
    },
    "RayServiceSpec": {"serveConfigV2": "string", "rayClusterConfig": "RayClusterSpec"},
    "RayClusterSpec": {
        "rayVersion": "string",
        "authOptions": "AuthOptions",
        "enableInTreeAutoscaling": "boolean",
        "gcsFaultToleranceOptions": "GcsFaultToleranceOptions",
        "headGroupSpec": "HeadGroupSpec",
        "workerGroupSpecs": "[WorkerGroupSpec]",
    },
    "AuthOptions": {"mode": "disabled|token"},
    "GcsFaultToleranceOptions": {"redisAddress": "string", "redisPassword": "RedisCredential"},
    "RedisCredential": {"valueFrom": "EnvVarSource"},
    "HeadGroupSpec": {"rayStartParams": "map", "resources": "map", "template": "PodTemplateSpec"},
    "WorkerGroupSpec": {
        "groupName": "string",
        "replicas": "integer",
        "minReplicas": "integer",
        "maxReplicas": "integer",
        "rayStartParams": "map",
        "resources": "map",
        "labels": "map",
        "template": "PodTemplateSpec",
    },
    "ObjectMeta": {"name": "string", "labels": "map", "annotations": "map"},
    "LabelSelector": {"matchLabels": "map"},
    "PodTemplateSpec": {"metadata": "ObjectMeta", "spec": "PodSpec"},
    "PodSpec": {
        "automountServiceAccountToken": "boolean",
        "enableServiceLinks": "boolean",
        "securityContext": "PodSecurityContext",
        "terminationGracePeriodSeconds": "integer",
        "nodeSelector": "map",
        "affinity": "Affinity",
        "topologySpreadConstraints": "[TopologySpreadConstraint]",
        "containers": "[Container]",
        "volumes": "[Volume]",
    },
    "PodSecurityContext": {
        "runAsNonRoot": "boolean",
        "runAsUser": "integer",
        "runAsGroup": "integer",
        "fsGroup": "integer",
        "seccompProfile": "SeccompProfile",
    },
    "SeccompProfile": {"type": "RuntimeDefault|Unconfined|Localhost"},
    "Affinity": {"podAffinity": "PodAffinity", "podAntiAffinity": "PodAntiAffinity"},
    "PodAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": "[WeightedPodAffinityTerm]"},
    "PodAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": "[PodAffinityTerm]"},
    "WeightedPodAffinityTerm": {"weight": "integer", "podAffinityTerm": "PodAffinityTerm"},
    "PodAffinityTerm": {"topologyKey": "string", "labelSelector": "LabelSelector"},
    "TopologySpreadConstraint": {
        "maxSkew": "integer",
        "whenUnsatisfiable": "ScheduleAnyway|DoNotSchedule",
        "topologyKey": "string",
        "labelSelector": "LabelSelector",
    },
    "Container": {
        "name": "string",
        "image": "string",
        "args": "[string]",
        "env": "[EnvVar]",
        "ports": "[ContainerPort]",
        "startupProbe": "Probe",
        "livenessProbe": "Probe",
        "readinessProbe": "Probe",
        "lifecycle": "Lifecycle",
        "resources": "ResourceRequirements",
        "securityContext": "SecurityContext",
        "volumeMounts": "[VolumeMount]",
    },
    "EnvVar": {"name": "string", "value": "string", "valueFrom": "EnvVarSource"},
    "EnvVarSource": {"fieldRef": "ObjectFieldSelector", "secretKeyRef": "SecretKeySelector"},
    "ObjectFieldSelector": {"fieldPath": "string"},
    "SecretKeySelector": {"name": "string", "key": "string", "optional": "boolean"},
    "ContainerPort": {"name": "string", "containerPort": "integer"},
    "Probe": {
        "httpGet": "HTTPGetAction",
        "periodSeconds": "integer",
        "timeoutSeconds": "integer",
        "failureThreshold": "integer",
    },
    "HTTPGetAction": {"path": "string", "port": "int-or-string"},
    "Lifecycle": {"preStop": "LifecycleHandler"},
    "LifecycleHandler": {"exec": "ExecAction"},
    "ExecAction": {"command": "[string]"},
    "ResourceRequirements": {"requests": "map", "limits": "map"},
    "SecurityContext": {
        "allowPrivilegeEscalation": "boolean",
        "readOnlyRootFilesystem": "boolean",
        "capabilities": "Capabilities",
    },
    "Capabilities": {"drop": "[string]"},
    "VolumeMount": {"name": "string", "mountPath": "string", "readOnly": "boolean"},
    "Volume": {
        "name": "string",
        "emptyDir": "EmptyDirVolumeSource",
        "configMap": "ConfigMapVolumeSource",
        "secret": "SecretVolumeSource",
        "persistentVolumeClaim": "PersistentVolumeClaimVolumeSource",
    },
    "EmptyDirVolumeSource": {"medium": "Memory", "sizeLimit": "string"},
    "ConfigMapVolumeSource": {"name": "string"},
    "SecretVolumeSource": {"secretName": "string", "items": "[KeyToPath]"},
    "KeyToPath": {"key": "string", "path": "string"},
    "PersistentVolumeClaimVolumeSource": {"claimName": "string", "readOnly": "boolean"},
}
REQUIRED: Final[dict[str, set[str]]] = {
    "ServicePort": {"port"},
    "DeploymentSpec": {"selector", "template"},
    "RayServiceSpec": {"rayClusterConfig"},
    "RayClusterSpec": {"headGroupSpec"},
    "HeadGroupSpec": {"template"},
    "WorkerGroupSpec": {"groupName", "minReplicas", "maxReplicas", "template"},
    "PodSpec": {"containers"},
    "PodAffinityTerm": {"topologyKey"},
    "WeightedPodAffinityTerm": {"weight", "podAffinityTerm"},
    "TopologySpreadConstraint": {"maxSkew", "topologyKey", "whenUnsatisfiable"},
    "Container": {"name", "image"},
    "EnvVar": {"name"},
    "ObjectFieldSelector": {"fieldPath"},
    "SecretKeySelector": {"key"},
    "ContainerPort": {"containerPort"},
    "HTTPGetAction": {"port"},
    "SeccompProfile": {"type"},
    "VolumeMount": {"name", "mountPath"},
    "Volume": {"name"},
    "KeyToPath": {"key", "path"},
    "PersistentVolumeClaimVolumeSource": {"claimName"},
    **{
        kind: {"apiVersion", "kind", "metadata"}
        for kind, fields in TYPES.items()
        if "apiVersion" in fields
    },
}
SCALARS: Final[dict[str, type | tuple[type, ...]]] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "int-or-string": (int, str),
}


def problems(value: Any, kind: str, path: str, seen: set[tuple[str, str]]) -> Iterator[str]:
    """Says what does not fit, by path; adds the fields that are there to `seen`."""
    if kind.startswith("["):
        if not isinstance(value, list):
            yield f"{path}: no list"
            return
        for place, item in enumerate(value):
            yield from problems(item, kind[1:-1], f"{path}[{place}]", seen)
    elif kind == "map":
        if not (isinstance(value, dict) and all(isinstance(it, str) for it in value.values())):
            yield f"{path}: no mapping to texts"
    elif kind in SCALARS:
        wanted = SCALARS[kind]
        # True is a number for Python, and none for Kubernetes.
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            yield f"{path}: {value!r} is no {kind}"
    elif kind in TYPES and not isinstance(value, str):
        yield from _fields(value, kind, path, seen)
    elif value not in kind.split("|"):
        yield f"{path}: {value!r} is none of {kind}"


def _fields(
    value: Mapping[str, Any], kind: str, path: str, seen: set[tuple[str, str]]
) -> Iterator[str]:
    fields = TYPES[kind]
    for name in REQUIRED.get(kind, set()) - value.keys():
        yield f"{path}.{name}: missing"
    for name, item in value.items():
        if name not in fields:
            yield f"{path}.{name}: {kind} has no such field"
            continue
        seen.add((kind, name))
        yield from problems(item, fields[name], f"{path}.{name}", seen)
