"""Two nodes side by side: what must be equal for blocks and states to move. Pure."""

from connector.doctor.findings import Finding, Verdict, good, wrong
from connector.doctor.probe import NodeReport
from connector.pd.geometry import Difference, differences, groups_of
from engine.rpc.messages import Handshake

FIXES = {
    "transport": "name one transport for both in --kv-transfer-config (kv_connector_extra_config)",
    "protocol": "run the same version of Tandem on both nodes",
    "model_fingerprint": "start both nodes with the same model folder",
    "prefix_hash_seed": "give both nodes the same --prefix-hash-seed",
}
OF_LAYERS = "start both nodes with the same model and --dtype"
EXPECTED = {"P": "prefill", "D": "decode"}


def compare(p: NodeReport, d: NodeReport) -> list[Finding]:
    """What the two nodes' own words say about the pair; empty when one of them said nothing."""
    findings = [found for node in (p, d) if (found := _kind(node)) is not None]
    if p.handshake is None or d.handshake is None:
        return findings
    if p.handshake.engine_id == d.handshake.engine_id:
        fix = "give the URL of the prefill node first and that of the decode node second"
        return [*findings, wrong("P and D", "both URLs lead to one process", fix)]
    differing = _differing(differences(p.handshake, d.handshake))
    return [*findings, *(differing or _agreed(p.handshake, d.handshake))]


def _kind(node: NodeReport) -> Finding | None:
    """Any node can do either, so that an unexpected kind is no more than a hint."""
    if node.info is None or node.info.kind == EXPECTED[node.name]:
        return None
    text = f"{node.http.url} was started as {node.info.kind} node"
    return Finding(Verdict.NOTE, node.name, text, "the first URL is P's, the second D's")


def _agreed(p: Handshake, d: Handshake) -> list[Finding]:
    sizes = [sorted({group.block_size for group in groups_of(node)}) for node in (p, d)]
    blocks = f"blocks of {_listed(sizes[0])} tokens on P, of {_listed(sizes[1])} on D"
    layers = {layer for group in groups_of(p) for layer in group.layers}
    return [
        good("protocol", f"both speak {p.geometry.get('protocol', '?')}"),
        good("geometry", f"{len(layers)} layers keep the same; {blocks}"),
        good("transport", f"both use {p.transport}"),
        good("prefix hash seed", "equal"),
    ]


def _listed(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes))


def _differing(found: list[Difference]) -> list[Finding]:
    """One finding for all layers that differ in the same way."""
    subjects: dict[str, list[str]] = {}
    for one in found:
        subjects.setdefault(_difference(one), []).append(one.key)
    findings = []
    for text, keys in subjects.items():
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        findings.append(wrong(f"{keys[0]}{more}", text, FIXES.get(keys[0], OF_LAYERS)))
    return findings


def _difference(found: Difference) -> str:
    """Of long values only the words that differ, such as `head_dim=64`."""
    here, there = found.here.split(), found.there.split()
    of_p = [word for word in here if word not in there] or here
    of_d = [word for word in there if word not in here] or there
    return f"{' '.join(of_p)!r} on P and {' '.join(of_d)!r} on D"
