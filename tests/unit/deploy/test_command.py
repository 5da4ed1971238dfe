"""The command `tandem`: what an installed package has to offer."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.command import PROGRAMS
from deploy.config import DEMO_CLUSTER, load_cluster

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tandem(
    *arguments: str, folder: Path, without: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """As the installed script does it, from another folder, where packages may be missing."""
    missing = f"sys.modules.update(dict.fromkeys({[*without]!r}))"
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); {missing}\n"
        "from deploy.command import app; app()"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_program_keeps_its_options_and_gets_the_command_s_name(tmp_path: Path) -> None:
    assert PROJECT["project"]["scripts"] == {"tandem": "deploy.command:app"}
    told = tandem("--help", folder=tmp_path).stdout
    assert all(f" {name} " in told for name in PROGRAMS)
    assert "--install-completion" in told
    bare = tandem(folder=tmp_path)
    assert (bare.returncode, bare.stdout) == (0, told)
    version = PROJECT["project"]["version"]
    assert tandem("--version", folder=tmp_path).stdout == f"tandem {version}\n"
    model = load_cluster().model
    cut = tandem("arena", model, "--block-size", "32", folder=tmp_path)
    assert "32-token blocks" in cut.stdout, cut
    assert (
        "Usage: tandem arena [OPTIONS] [model]" in tandem("arena", "--help", folder=tmp_path).stdout
    )
    refused = tandem("proxy", "--decode", "ftp://x", folder=tmp_path)
    assert refused.returncode == 2
    assert "error: node URL 'ftp://x' must be" in refused.stderr


@pytest.mark.parametrize("name", ["serve", "status"])
def test_what_needs_an_extra_says_so_and_still_has_a_help(name: str, tmp_path: Path) -> None:
    packages = ("ray", "openai")
    refused = tandem(name, folder=tmp_path, without=packages)
    extra = PROGRAMS[name].extra
    assert refused.returncode == 2
    assert f"pip install '.[{extra}]' in a checkout" in refused.stderr
    helped = tandem(name, "--help", folder=tmp_path, without=packages)
    assert helped.returncode == 0, helped.stderr
    assert f"Usage: tandem {name} " in helped.stdout


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("status", 3, "error: no cluster is up (no {folder}/tandem-"),
        ("down", 3, "error: no cluster is up (no {folder}/tandem-"),
        ("drain decode-0 --name tandem", 3, "error: no cluster is up (no {folder}/tandem-"),
        ("apply {folder}/none.yaml", 2, "error: {folder}/none.yaml: No such file"),
        ("plan {folder}/wrong.yaml", 2, "error: {folder}/wrong.yaml:2: decode.replicas: must be"),
        ("up {folder}/wrong.yaml", 2, "error: {folder}/wrong.yaml:2: decode.replicas: must be"),
        ("scale decode=x", 2, "'decode=x': write ROLE=NUMBER, with prefill, decode, proxy"),
        ("scale decoder=2", 2, "'decoder=2': write ROLE=NUMBER"),
        ("scale decode=-1", 2, "'decode=-1': write ROLE=NUMBER"),
        ("logs decode-0 --lines 0", 2, "'--lines'"),
    ],
)
def test_clusters_refuse_by_exit_status_before_there_is_a_ray(
    words: str, status: int, told: str, tmp_path: Path
) -> None:
    (tmp_path / "wrong.yaml").write_text("model: m\ndecode: {replicas: 0}\n")
    done = subprocess.run(
        [sys.executable, "-m", "deploy", *words.format(folder=tmp_path).split()],
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done
    assert told.format(folder=tmp_path) in " ".join(done.stderr.split())


def test_what_programs_read_is_packaged() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    packaged = {
        path
        for name, globs in data.items()
        if name != "*"
        for each in globs
        for path in (ROOT / name.replace(".", "/")).glob(each)
    }
    needed = {DEMO_CLUSTER, *Path(load_cluster().model).iterdir()}
    assert needed <= packaged
    # Of an extension setuptools packs what is named, and builds it anew if that is newer.
    (kernels,) = PROJECT["tool"]["setuptools"]["ext-modules"]
    named = {ROOT / name for name in (*kernels["sources"], *kernels["depends"])}
    assert named == set((ROOT / "engine/native/src").iterdir())
    typed = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert typed == {
        name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
