"""Two nodes side by side: what must be equal for blocks and states to move. Pure."""

from connector.doctor.findings import Finding, Verdict, good, wrong
from connector.doctor.probe import NodeReport
from connector.pd.geometry import Difference, differences
from engine.rpc.messages import Handshake

FIXES = {
    "transport": "name one transport for both in --kv-transfer-config (kv_connector_extra_config)",
    "protocol": "run the same version of Tandem on both nodes",
    "model_fingerprint": "start both nodes with the same model folder",
    "prefix_hash_seed": "give both nodes the same --prefix-hash-seed",
}
OF_GROUPS = "start both nodes with the same model, --dtype and --block-size"
EXPECTED = {"P": "prefill", "D": "decode"}


def compare(p: NodeReport, d: NodeReport) -> list[Finding]:
    """What the two nodes' own words say about the pair; empty when one of them said nothing."""
    findings = [found for node in (p, d) if (found := _kind(node)) is not None]
    if p.handshake is None or d.handshake is None:
        return findings
    if p.handshake.engine_id == d.handshake.engine_id:
        fix = "give the URL of the prefill node first and that of the decode node second"
        return [*findings, wrong("P and D", "both URLs lead to one process", fix)]
    differing = [_differing(one) for one in differences(p.handshake, d.handshake)]
    return [*findings, *(differing or _agreed(p.handshake))]


def _kind(node: NodeReport) -> Finding | None:
    """Any node can do either, so that an unexpected kind is no more than a hint."""
    if node.info is None or node.info.kind == EXPECTED[node.name]:
        return None
    text = f"{node.http.url} was started as {node.info.kind} node"
    return Finding(Verdict.NOTE, node.name, text, "the first URL is P's, the second D's")


def _agreed(both: Handshake) -> list[Finding]:
    geometry = both.geometry
    return [
        good("protocol", f"both speak {geometry.get('protocol', '?')}"),
        good("geometry", f"{geometry.get('num_kv_cache_groups', '?')} equal KV cache groups"),
        good("transport", f"both use {both.transport}"),
        good("prefix hash seed", "equal"),
    ]


def _differing(found: Difference) -> Finding:
    """Of long values only the words that differ, such as `block_size=16`."""
    here, there = found.here.split(), found.there.split()
    of_p = [word for word in here if word not in there] or here
    of_d = [word for word in there if word not in here] or there
    text = f"{' '.join(of_p)!r} on P and {' '.join(of_d)!r} on D"
    return wrong(found.key, text, FIXES.get(found.key, OF_GROUPS))
