"""Probes one node: all ports reachable, cluster token accepted, ready to serve."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from connector.doctor.findings import DoctorError, Finding, good, wrong
from connector.pd.wire.control_client import ControlClient
from connector.pd.wire.messages import Handshake
from engine.errors import AuthenticationError, InvalidRequestError, TandemError, UnprovenPeerError
from serving.rpc.address import join_host_port
from serving.rpc.client import NodeClient
from serving.rpc.messages import NodeInfo
from serving.rpc.node_http import HttpNode, NodeAddress

CALLER = "doctor"
SAME_TOKEN = "give the doctor and all nodes the same --cluster-token (or TANDEM_CLUSTER_TOKEN)"


@dataclass(slots=True)
class NodeReport:
    """The answers of a node; None where the probe stopped earlier. `host`: as advertised."""

    name: str
    http: HttpNode
    findings: list[Finding] = field(default_factory=list)
    host: str = ""
    info: NodeInfo | None = None
    handshake: Handshake | None = None


async def probe(name: str, http: HttpNode, token: str | None) -> NodeReport:
    """Asks one node on every port; stops when the next question needs an answer that failed."""
    report = NodeReport(name, http)
    try:
        told = await _ask_http(report)
        report.host = told.host
        # The host of the URL, not the advertised one, which may not be reachable from here.
        address = join_host_port(http.host, told.grpc_port)
        await _ask_node(report, address, token)
        await _ask_control(report, address, token)
    except DoctorError as error:
        report.findings.append(error.finding)
    return report


async def _ask_http(report: NodeReport) -> NodeAddress:
    http, subject = report.http, f"{report.name} HTTP {report.http.url}"
    try:
        health = await http.get("/health")
        node_info = await http.get("/node_info")
    except TandemError as error:
        fix = "start it with the --host and --port of this URL, or open that port"
        raise DoctorError(subject, f"not reachable: {error}", fix) from error
    found = good(subject, "reachable and healthy")
    if health.status != 200:
        text = f"/health answers {health.error}"
        found = wrong(subject, text, "look into its log and restart it")
    report.findings.append(found)
    try:
        return msgspec.convert(node_info.body, NodeAddress)
    except msgspec.ValidationError as error:
        text = f"no Tandem node: /node_info answers {node_info.error}"
        fix = "give the HTTP port of a node, not of a proxy"
        raise DoctorError(subject, text, fix) from error


async def _ask_node(report: NodeReport, address: str, token: str | None) -> None:
    subject = f"{report.name} gRPC {address}"
    client = NodeClient(address, token=token, tls=report.http.tls)
    with _reaching(subject):
        try:
            report.info = info = await client.describe(report.http.timeout_s)
        finally:
            await client.close()
    text = f"{info.engine_id}, started as {info.kind} node, serves {', '.join(info.model_names)}"
    found = good(subject, text)
    if not info.ready:
        found = wrong(subject, f"not ready: {info.reason}", "look into its log")
    report.findings.append(found)


async def _ask_control(report: NodeReport, address: str, token: str | None) -> None:
    subject, http = f"{report.name} control {address}", report.http
    client = ControlClient(
        address, token=token, caller_engine_id=CALLER, timeout_s=http.timeout_s, tls=http.tls
    )
    with _reaching(subject):
        async with client:
            met = await client.handshake()
    report.handshake = met
    token_text = "without a cluster token" if token is None else "with the cluster token"
    text = f"shakes hands {token_text}, transport {met.transport}"
    report.findings.append(good(subject, text))


@contextmanager
def _reaching(subject: str) -> Iterator[None]:
    """Raises DoctorError for what a gRPC call raises."""
    try:
        yield
    except (AuthenticationError, UnprovenPeerError) as error:
        raise DoctorError(subject, f"refused: {error}", SAME_TOKEN) from error
    except InvalidRequestError as error:
        fix = "run the same version of Tandem everywhere"
        raise DoctorError(subject, f"refused: {error}", fix) from error
    except TandemError as error:
        fix = "choose a --grpc-port that is open between the nodes and from here"
        raise DoctorError(subject, f"not reachable: {error}", fix) from error
