"""`deploy.serve_app:app`: a cluster as an application of Ray Serve, which watches over its health.

    HTTP to Serve ──▶ where the proxy is, and how many serve      clients ──▶ proxy ──▶ nodes

No traffic goes through Serve, and the cluster outlives the application: after `serve delete`,
`tandem down` ends it.
"""

import asyncio
from pathlib import Path
from typing import Any, Final

import structlog

from deploy.config import ROLES, load_cluster
from deploy.controller import ClusterStatus
from deploy.ray_cluster import Clusters, RayThread
from deploy.report import urls_of_proxies
from engine.errors import ConfigError, UnavailableError
from serving.process import configure_logging

FILE: Final = "/etc/tandem/cluster.yaml"
"""Where the manifests of a RayService mount it, see `deploy.kubernetes.kuberay`."""

log = structlog.get_logger()


class TandemCluster:
    """Applies a cluster file; Serve makes another one of it when it is not healthy."""

    def __init__(self, file: str) -> None:
        """Returns when all members serve, or at once where the cluster was up before.

        Raises ConfigError for a wrong file, DeadlineExceededError when members do not start.
        """
        configure_logging("info")
        config = load_cluster(Path(file))
        self._cluster = Clusters(RayThread()).named(config.name)
        before = self._cluster.status()
        self._cluster.apply(config, before)
        # A new one of an old cluster must not wait for a machine that may never come back.
        if before.config is None:
            self._cluster.wait_until_whole(lambda text: log.info(text))

    async def check_health(self) -> None:
        """Called by Serve. Raises UnavailableError when no request could be served."""
        status = await self._status()
        for role in ("proxy", "decode"):
            if not status.count(role):
                raise UnavailableError(f"no {role} of cluster {self._cluster.name} serves")

    async def __call__(self, request: object) -> dict[str, Any]:
        """Where clients ask, and how many members serve beside those that are wanted."""
        status = await self._status()
        config = status.config
        return {
            "name": self._cluster.name,
            "proxies": urls_of_proxies(status),
            "is_whole": status.is_whole,
            "serving": {role: status.count(role) for role in ROLES},
            "wanted": {role: config.group(role).replicas if config else 0 for role in ROLES},
        }

    async def _status(self) -> ClusterStatus:
        return await asyncio.to_thread(self._cluster.status)


def app(args: dict[str, str]) -> Any:
    """For `serve deploy` and `serve run`; its only argument is `file`, the cluster file.

    Raises ConfigError for others, and where Ray Serve is not installed.
    """
    if unknown := args.keys() - {"file"}:
        raise ConfigError(f"{', '.join(sorted(unknown))}: the only argument is file")
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError("Ray Serve is not installed: pip install 'ray[serve]'") from error
    # No CPU: on Kubernetes each machine has just enough for its member.
    options = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    return serve.deployment(TandemCluster, **options).bind(args.get("file", FILE))
