"""`tandem render k8s CLUSTER.yaml`: writes manifests of a cluster to standard output."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import typer
import yaml

from deploy.config import ClusterConfig, load_cluster
from deploy.kubernetes import kuberay, plain
from deploy.kubernetes.pods import IMAGE, Json, Site, check_cluster
from deploy.yaml_lines import YamlLines
from engine.errors import ConfigError

Form = Literal["plain", "ray", "ray-service"]
FORMS: Mapping[Form, Callable[[ClusterConfig, Site], Iterator[Json]]] = MappingProxyType(
    {
        "plain": plain.manifests,
        "ray": kuberay.cluster_manifests,
        "ray-service": kuberay.service_manifests,
    }
)
HOW = (
    "plain: Deployments and Services; ray: a RayCluster for `tandem apply`; ray-service: a "
    "RayService with Ray Serve. Both are KubeRay's."
)


class Blocks(yaml.SafeDumper):  # type: ignore[misc]
    """Writes the lines of a text below each other, and no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


Blocks.add_representer(str, Blocks.represent_str)


def render(config: ClusterConfig, form: Form, site: Site) -> list[dict[str, Any]]:
    """All objects of a cluster. Raises ConfigError naming what Kubernetes cannot have."""
    check_cluster(config, site)
    return list(FORMS[form](config, site))


def render_k8s(
    cluster: Annotated[Path, typer.Argument(help="The cluster file.")],
    form: Annotated[Form, typer.Option("--format", help=HOW)] = "plain",
    *,
    image: Annotated[str, typer.Option(help="The image of all pods.")] = IMAGE,
    model_claim: Annotated[
        str | None, typer.Option(help="PersistentVolumeClaim with the model's folder: /models.")
    ] = None,
    redis_address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a Redis, with which Ray survives its head.")
    ] = None,
) -> None:
    """Write the manifests of a cluster for `kubectl apply`."""
    config = load_cluster(cluster)
    try:
        rendered = render(config, form, Site(image, model_claim, redis_address))
    except ConfigError as error:
        raise YamlLines.read(cluster).located(error) from error
    typer.echo(yaml.dump_all(rendered, Dumper=Blocks, sort_keys=False, width=100), nl=False)
