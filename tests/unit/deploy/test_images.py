"""The image and the composition of containers, as far as they can be held without Docker."""

import fnmatch
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from proxy.config import ProxyConfig
from serving.config import NodeConfig
from tests.source_tree import ROOT
from tests.support.deploy.command_lines import config_of

COMPOSE = ROOT / "deploy" / "compose"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTRUCTIONS = {"ARG", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


def dockerfile() -> list[tuple[str, str]]:
    """Instruction and the rest of each line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n", "", text).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines if line]


def is_sent(path: str) -> bool:
    """True if .dockerignore lets Docker see a file; its last line that fits decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        anywhere = pattern.startswith("**/")
        names = Path(path).parts if anywhere else [path, *map(str, Path(path).parents)]
        if any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for name in names):
            sent = line[0] == "!"
    return sent


def test_the_image_copies_what_the_project_installs() -> None:
    steps = dockerfile()
    assert {name for name, _ in steps} == INSTRUCTIONS
    assert steps[0] == ("ARG", "BASE=python:3.11-slim")
    assert [rest for name, rest in steps if name == "FROM"] == ["${BASE} AS build", "${BASE}"]
    copied = [rest.split() for name, rest in steps if name == "COPY" and "--from" not in rest]
    sources = {source for *some, _ in copied for source in some}
    assert all((ROOT / source).exists() and is_sent(source) for source in sources)
    packages = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    needed = {name.rstrip("*") for name in packages}
    assert needed | {"constraints.txt", "pyproject.toml", "README.md"} == sources
    assert is_sent("deploy/demo/model/config.json") and is_sent("engine/native/src/kernels.cpp")
    built = ("engine/__pycache__/x.pyc", "engine/native/_kernels.so")
    kept_out = (".git/config", ".venv/bin/python", "tests/tree.py", *built)
    assert not any(map(is_sent, kept_out))


def test_the_image_runs_tandem_as_nobody_in_particular() -> None:
    steps = dockerfile()
    assert steps[-1] == ("ENTRYPOINT", '["tandem"]')
    assert json.loads(steps[-1][1])[0] in PROJECT["project"]["scripts"]
    assert ("USER", "10001:10001") in steps
    extras = PROJECT["project"]["optional-dependencies"]
    (named,) = (rest for name, rest in steps if name == "ARG" and rest.startswith("EXTRAS="))
    assert set(named.partition("=")[2].split(",")) <= extras.keys()
    for _, command in (step for step in steps if step[0] == "RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True, timeout=10)


def composed() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = msgspec.yaml.decode(
        (COMPOSE / "compose.yaml").read_bytes()
    )["services"]
    return services


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_composition_s_servers_start_with_these_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = composed()
    # Compose refuses to start without it.
    assert "TANDEM_CLUSTER_TOKEN" in services["proxy"]["environment"]
    monkeypatch.setenv("TANDEM_CLUSTER_TOKEN", "from-the-shell")
    configs = {
        name: config_of(["tandem", *service["command"]], monkeypatch)
        for name, service in services.items()
        if service["image"] == "tandem"
    }
    proxy = configs.pop("proxy")
    assert isinstance(proxy, ProxyConfig) and proxy.grpc_port is not None
    addresses = {f"proxy:{proxy.port}"}
    for name, config in configs.items():
        assert isinstance(config, NodeConfig)
        assert config.proxy == (f"http://proxy:{proxy.port}",)
        assert any(it.endswith(f":{config.model}:ro") for it in services[name]["volumes"])
        addresses.add(f"{name}:{config.port}")
    targets = msgspec.yaml.decode((COMPOSE / "targets.yaml").read_bytes())
    assert addresses == {address for it in targets for address in it["targets"]}
    # Without a key in front of it, nothing is published beyond this machine.
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert f"127.0.0.1:{proxy.port}:{proxy.port}" in ports
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)


def test_what_the_composition_mounts_is_there() -> None:
    services = composed()
    mounts = {
        where: COMPOSE / re.sub(r"\$\{MODEL:-(.*)\}", r"\1", source)
        for service in services.values()
        for source, where in (
            re.fullmatch(r"(\$\{.*\}|[^:]*):([^:]*):ro", volume).groups()  # type: ignore[union-attr]
            for volume in service.get("volumes", ())
        )
    }
    assert all(path.exists() for path in mounts.values()), mounts
    scraped = msgspec.yaml.decode(mounts["/etc/prometheus/prometheus.yml"].read_bytes())
    read = [*scraped["rule_files"], *scraped["scrape_configs"][0]["file_sd_configs"][0]["files"]]
    folder = mounts["/etc/prometheus/prometheus.yml"].parent
    # Beside the file that names them, in the container and in the checkout.
    assert all(f"/etc/prometheus/{name}" in mounts and (folder / name).exists() for name in read)
    provisioning = "/etc/grafana/provisioning"
    source = msgspec.yaml.decode(mounts[f"{provisioning}/datasources/tandem.yaml"].read_bytes())
    url = urlsplit(source["datasources"][0]["url"])
    assert (
        url.hostname in services
        and f"127.0.0.1:{url.port}:{url.port}" in services[url.hostname]["ports"]
    )
    boards = msgspec.yaml.decode(mounts[f"{provisioning}/dashboards/tandem.yaml"].read_bytes())
    shown = boards["providers"][0]["options"]["path"]
    assert any(where.startswith(f"{shown}/") for where in mounts)


def test_the_addresses_of_the_readme_are_scraped(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = msgspec.yaml.decode((ROOT / "deploy/monitoring/targets.yaml").read_bytes())
    page = (ROOT / "README.md").read_text()
    ports = re.findall(r"^tandem (?:prefill|decode|proxy) .*--port (\d+)$", page, re.M)
    assert {f"127.0.0.1:{port}" for port in ports} == {it["targets"][0] for it in targets}
