"""The digest of a member: equal for equal members, another one for all that a restart changes."""

from pathlib import Path

import msgspec
import pytest

from deploy.config import ROLES, ClusterConfig, Role, load_cluster
from deploy.member import Desired, Spec

FILE = """
model: m
cluster_token: t
config: {drain_timeout: 5, prefix_hash_seed: s}
prefill:
  replicas: 2
  num_cpus: 1
  resources: {nic: 1}
  config: {mamba_checkpoint_share: 1}
decode:
  num_gpus: 1
  labels: {zone: a}
  config: {served_model_name: [a, b], kv_transfer_config: {kv_connector_extra_config: {}}}
proxy:
  config: {first_token_timeout: 60, prefill: [], allowed_origins: ["http://a"]}
runtime_env: {working_dir: /x, since: 2026-01-01, weight: 1.0, env_vars: {A: "1", B: "2"}}
"""


def read(text: str, folder: Path) -> ClusterConfig:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return load_cluster(file)


def digests(config: ClusterConfig) -> dict[Role, str]:
    return {role: Spec.of(config, role).digest for role in ROLES}


def told(config: ClusterConfig) -> ClusterConfig:
    """As a member tells it to a later life of the controller."""
    held = msgspec.json.encode(Desired(generation=3, config=config))
    found = msgspec.json.decode(held, type=Desired).config
    assert found is not None
    return found


def test_a_later_life_of_the_controller_finds_equal_members(tmp_path: Path) -> None:
    config = read(FILE, tmp_path)
    # A controller reads what it is given as JSON first.
    wanted = msgspec.json.decode(msgspec.json.encode(config), type=ClusterConfig)
    assert digests(told(wanted)) == digests(wanted)
    assert len(set(digests(wanted).values())) == len(ROLES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("drain_timeout: 5", "drain_timeout: 5.0"),
        ("num_cpus: 1", "num_cpus: 1.0"),
        ("{drain_timeout: 5, prefix_hash_seed: s}", "{prefix_hash_seed: s, drain_timeout: 5}"),
        ('{A: "1", B: "2"}', '{B: "2", A: "1"}'),
        ("resources: {nic: 1}", "resources: {nic: 1.0}"),
        ("replicas: 2", "replicas: 3"),
        ("replicas: 2", "strategy: PACK"),
        ("replicas: 2", "rolling_update: drain_first"),
        ("replicas: 2", "autoscaling: {max_replicas: 3}"),
    ],
)
def test_what_no_restart_changes_leaves_members_as_they_are(
    old: str, new: str, tmp_path: Path
) -> None:
    assert FILE.count(old) == 1
    assert digests(read(FILE.replace(old, new), tmp_path)) == digests(read(FILE, tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "roles"),
    [
        ("model: m", "model: n", {"prefill", "decode"}),
        ("cluster_token: t", "cluster_token: u", {*ROLES}),
        ("drain_timeout: 5", "drain_timeout: 6", {"prefill", "decode"}),
        ("num_cpus: 1", "num_cpus: 2", {"prefill"}),
        ("nic: 1", "nic: 2", {"prefill"}),
        ("num_gpus: 1", "num_gpus: 2", {"decode"}),
        ("zone: a", "zone: b", {"decode"}),
        ("[a, b]", "[b, a]", {"decode"}),
        ("first_token_timeout: 60", "first_token_timeout: 61", {"proxy"}),
        ("working_dir: /x", "working_dir: /y", {*ROLES}),
        ('A: "1"', 'A: "3"', {*ROLES}),
    ],
)
def test_what_a_restart_changes_makes_members_of_these_roles_outdated(
    old: str, new: str, roles: set[Role], tmp_path: Path
) -> None:
    assert FILE.count(old) == 1
    before, after = digests(read(FILE, tmp_path)), digests(read(FILE.replace(old, new), tmp_path))
    assert {role for role in ROLES if before[role] != after[role]} == roles
