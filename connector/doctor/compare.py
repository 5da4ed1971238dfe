"""Compares two nodes: geometry, protocol, seed, transport and address. Pure."""

from connector.doctor.findings import Finding, Verdict, good, wrong
from connector.doctor.probe import NodeReport
from connector.pd.wire.geometry import MODEL_PREFIX, Difference, differences, groups_of
from connector.pd.wire.messages import Handshake
from connector.transports.auto import NEAR, host_behind, offered_by
from connector.transports.shm import why_out_of_reach
from engine.distribution import how_to_install
from engine.errors import TransportError
from serving.rpc.address import is_loopback

FIXES = {
    "transport": "let both choose by themselves (auto), or name one transport for both in "
    "--kv-transfer-config (kv_connector_extra_config)",
    "protocol": "run the same version of Tandem on both nodes",
    "prefix_hash_seed": "give both nodes the same --prefix-hash-seed",
}
NETWORK = 'choose "auto", or one of nixl, ucx and zmq, for both nodes in --kv-transfer-config'
INSTALL = f"install the same transports on both: {how_to_install('nixl')}"
ADVERTISE = "start P with --host 0.0.0.0, or with an --advertise-host that D can reach"
OF_MODELS = "start both nodes with the same model folder and --dtype"
OF_LAYERS = "start both nodes with the same model and --dtype"
EXPECTED = {"P": "prefill", "D": "decode"}


def compare(p: NodeReport, d: NodeReport) -> list[Finding]:
    """Findings about the pair, from both handshakes; none if a node gave no handshake."""
    findings = [*_kind(p), *_kind(d)]
    if p.handshake is None or d.handshake is None:
        return findings
    if p.handshake.engine_id == d.handshake.engine_id:
        fix = "give the URL of the prefill node first and that of the decode node second"
        return [*findings, wrong("P and D", "both URLs lead to one process", fix)]
    differing = _differing(differences(p.handshake, d.handshake))
    try:
        here = host_behind(p.handshake.transport, p.handshake.transport_address)
        there = host_behind(d.handshake.transport, d.handshake.transport_address)
    except TransportError as error:
        return [*findings, wrong("transport", f"no address: {error}", FIXES["protocol"])]
    # The reason why they cannot share memory; None if they can, or if none is known.
    apart = None if p.http.host == d.http.host else "their URLs name two hosts"
    if here is not None and there is not None:
        apart = why_out_of_reach(there, here)
    # Two transports that differ make no way, so either the differences or what was agreed.
    agreed = [*_agreed(p.handshake, d.handshake), _way(p.handshake, d.handshake, apart)]
    findings += differing or agreed
    if apart is not None and is_loopback(p.host):
        text = f"P tells its peers {p.host}, which leads nowhere but to their own host"
        findings.append(wrong("address of P", text, ADVERTISE))
    return findings


def _kind(node: NodeReport) -> list[Finding]:
    """A note for an unexpected kind; only a note, since any node can do either part."""
    if node.info is None or node.info.kind == EXPECTED[node.name]:
        return []
    text = f"{node.http.url} was started as {node.info.kind} node"
    return [Finding(Verdict.NOTE, node.name, text, "the first URL is P's, the second D's")]


def _agreed(p: Handshake, d: Handshake) -> list[Finding]:
    of_p, of_d = (
        " and ".join(map(str, sorted({group.block_size for group in groups_of(node)})))
        for node in (p, d)
    )
    blocks = f"blocks of {of_p} tokens on P, of {of_d} on D"
    layers = {layer for group in groups_of(p) for layer in group.layers}
    return [
        good("protocol", f"both speak {p.geometry.get('protocol', '?')}"),
        good("geometry", f"{len(layers)} layers keep the same; {blocks}"),
        good("prefix hash seed", "equal"),
    ]


def _way(p: Handshake, d: Handshake, apart: str | None) -> Finding:
    """The transport that will move bytes from P to D, if both say what is true."""
    offered = offered_by(d.transport, d.transport_address)
    common = [it for it in offered_by(p.transport, p.transport_address) if it in offered]
    near = next((it for it in common if it in NEAR), None)
    far = next((it for it in common if it not in NEAR), None)
    if near and apart is None:
        return good("transport", f"{near}, on one host")
    if far and apart is None:
        return good("transport", f"{far}, which reaches other hosts")
    if far:
        return good("transport", f"{far}, between two hosts")
    if common:
        return wrong("transport", f"{near} cannot work: {apart}", NETWORK)
    return wrong("transport", "no transport is installed on both", INSTALL)


def _differing(found: list[Difference]) -> list[Finding]:
    """The findings; all layers that differ in the same way share one."""
    subjects: dict[str, list[str]] = {}
    for one in found:
        # Both values; of long ones only the words that differ, such as `head_dim=64`.
        here, there = one.here.split(), one.there.split()
        of_p = " ".join([word for word in here if word not in there] or here)
        of_d = " ".join([word for word in there if word not in here] or there)
        subjects.setdefault(f"{of_p!r} on P and {of_d!r} on D", []).append(one.key)
    findings = []
    for text, keys in subjects.items():
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        other = OF_MODELS if keys[0].startswith(MODEL_PREFIX) else OF_LAYERS
        findings.append(wrong(f"{keys[0]}{more}", text, FIXES.get(keys[0], other)))
    return findings
