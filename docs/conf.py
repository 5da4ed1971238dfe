"""The site: `make docs` builds it from the documents of the repository and from what it declares.

Metrics and HTTP paths are written at each build, from the tables that the servers use.
"""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from connector.multi.scheduler import COUNTERS as MULTI_COUNTERS
from connector.multi.scheduler import GAUGES as MULTI_GAUGES
from connector.offload import metrics as offload
from connector.pd import metrics as pd
from proxy.metrics import EVENT_ROWS, REQUEST_GAUGES, ProxyMetrics
from serving import metrics as serving
from serving.api.openapi import PATHS
from serving.telemetry.request_metrics import EngineRequestMetrics

GENERATED = Path(__file__).parent / "generated"
TABLES = (
    *(serving.SCHEDULER_GAUGES, serving.SCHEDULER_COUNTERS, serving.GRAMMAR_GAUGES),
    *(serving.EVENT_COUNTERS, serving.LOG_COUNTERS),
    *(pd.LEASE_GAUGES, pd.LEASE_COUNTERS, pd.PULL_GAUGES, MULTI_GAUGES, MULTI_COUNTERS),
    *(offload.INDEX_GAUGES, offload.SLOT_GAUGES, offload.FOLDER_GAUGES, offload.COUNTERS),
)


def rows_of(metrics: Iterator[Metric]) -> dict[str, str]:
    """Help texts by metric name, without those of Python's own client."""
    return {it.name: it.documentation for it in metrics if not it.name.startswith("process_")}


def table(rows: dict[str, str]) -> str:
    """Two columns, in the order of names."""
    lines = [f"| `{name}` | {text} |" for name, text in sorted(rows.items())]
    return "\n".join(["| name | |", "| --- | --- |", *lines, ""])


def metrics_page() -> str:
    """Every metric of nodes and of the proxy."""
    node = serving.NodeMetrics("model", "decode")
    EngineRequestMetrics(node)
    pd.TransferMetrics(node)
    # Families of declared tables read servers: here their names are enough.
    declared = {name: text for rows in TABLES for name, (_, text, *_) in rows.items()}
    of_nodes = {**rows_of(node.registry.collect()), **declared}
    proxy = ProxyMetrics(CollectorRegistry())
    of_events = {f"tandem_proxy_kv_events_{name}": text for name, (_, text) in EVENT_ROWS.items()}
    requests = {name: text for name, (_, text, *_) in REQUEST_GAUGES.items()}
    of_proxy = {**rows_of(proxy.registry.collect()), **of_events, **requests}
    return f"# Metrics\n\n## Nodes\n\n{table(of_nodes)}\n## Proxy\n\n{table(of_proxy)}"


def http_page() -> str:
    """Every path of proxy and nodes."""
    head = "# HTTP API\n\n`GET /openapi.json` of a server has the bodies of all paths.\n\n"
    return head + table({path: it.summary for path, it in PATHS.items()})


GENERATED.mkdir(exist_ok=True)
(GENERATED / "metrics.md").write_text(metrics_page())
(GENERATED / "http-api.md").write_text(http_page())

project = "Tandem"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    *("*.md", "docs/*.md", "docs/generated/*.md"),
    *("benchmarks/README.md", "benchmarks/pages/*.md"),
]
exclude_patterns = ["docs/_build"]
html_theme = "furo"
myst_heading_anchors = 3
