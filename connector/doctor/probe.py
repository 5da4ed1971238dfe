"""Probes one node: all ports reachable, cluster token accepted, ready to serve."""

import asyncio
from dataclasses import dataclass

import msgspec

from connector.doctor.findings import Finding, good, wrong
from connector.pd.wire.control_client import ControlClient
from connector.pd.wire.messages import Handshake
from engine.errors import AuthenticationError, InvalidRequestError, TandemError, UnprovenPeerError
from engine.rpc.address import join_host_port
from engine.rpc.client import NodeClient
from engine.rpc.messages import NodeInfo
from engine.rpc.node_http import HttpAnswer, HttpNode, NodeAddress

CALLER = "doctor"
SAME_TOKEN = "give the doctor and all nodes the same --cluster-token (or TANDEM_CLUSTER_TOKEN)"


@dataclass(slots=True, frozen=True)
class NodeReport:
    """The answers of a node; None where the probe stopped earlier. `host`: as advertised."""

    name: str
    http: HttpNode
    findings: list[Finding]
    host: str = ""
    info: NodeInfo | None = None
    handshake: Handshake | None = None


async def probe(name: str, http: HttpNode, token: str | None) -> NodeReport:
    """Asks one node on every port; stops when the next question needs an answer that failed."""
    findings: list[Finding] = []
    told = await _ask_http(name, http, findings)
    if told is None:
        return NodeReport(name, http, findings)
    # The host of the URL, not the advertised one, which may not be reachable from here.
    address = join_host_port(http.host, told.grpc_port)
    info = await _ask_grpc(name, address, token, findings=findings, http=http)
    if info is None:
        return NodeReport(name, http, findings, told.host)
    met = await _ask_control(name, address, token, findings=findings, http=http)
    return NodeReport(name, http, findings, told.host, info, met)


async def _ask_http(name: str, http: HttpNode, findings: list[Finding]) -> NodeAddress | None:
    subject = f"{name} HTTP {http.url}"
    try:
        health = await http.get("/health")
        node_info = await http.get("/node_info")
    except TandemError as error:
        fix = "start it with the --host and --port of this URL, or open that port"
        findings.append(wrong(subject, f"not reachable: {error}", fix))
        return None
    findings.append(_judge_health(subject, health))
    try:
        return msgspec.convert(node_info.body, NodeAddress)
    except msgspec.ValidationError:
        text = f"no Tandem node: /node_info answers {node_info.error}"
        findings.append(wrong(subject, text, "give the HTTP port of a node, not of a proxy"))
        return None


def _judge_health(subject: str, health: HttpAnswer) -> Finding:
    if health.status == 200:
        return good(subject, "reachable and healthy")
    return wrong(subject, f"/health answers {health.error}", "look into its log and restart it")


async def _ask_grpc(
    name: str, address: str, token: str | None, *, findings: list[Finding], http: HttpNode
) -> NodeInfo | None:
    subject = f"{name} gRPC {address}"
    client = NodeClient(address, token=token, tls=http.tls)
    try:
        info = await client.describe(http.timeout_s)
    except TandemError as error:
        findings.append(_unreachable(subject, error))
        return None
    finally:
        await client.close()
    if info.ready:
        told = (
            f"{info.engine_id}, started as {info.kind} node, serves {', '.join(info.model_names)}"
        )
        findings.append(good(subject, told))
    else:
        findings.append(wrong(subject, f"not ready: {info.reason}", "look into its log"))
    return info


async def _ask_control(
    name: str, address: str, token: str | None, *, findings: list[Finding], http: HttpNode
) -> Handshake | None:
    subject = f"{name} control {address}"
    control = ControlClient(
        address, token=token, caller_engine_id=CALLER, timeout_s=http.timeout_s, tls=http.tls
    )
    try:
        met = await asyncio.to_thread(control.handshake)
    except TandemError as error:
        findings.append(_unreachable(subject, error))
        return None
    finally:
        control.close()
    token_text = "without a cluster token" if token is None else "with the cluster token"
    findings.append(good(subject, f"shakes hands {token_text}, transport {met.transport}"))
    return met


def _unreachable(subject: str, error: TandemError) -> Finding:
    if isinstance(error, AuthenticationError | UnprovenPeerError):
        return wrong(subject, f"refused: {error}", SAME_TOKEN)
    if isinstance(error, InvalidRequestError):
        return wrong(subject, f"refused: {error}", "run the same version of Tandem everywhere")
    fix = "choose a --grpc-port that is open between the nodes and from here"
    return wrong(subject, f"not reachable: {error}", fix)
