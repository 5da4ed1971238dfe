"""The committed code is what the .proto text says, and the name `proto` stays free."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    # In a process of its own: the compiler's libraries and NIXL's cannot live in one process.
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iserving/rpc/pb=proto", *outputs]
    subprocess.run([*command, "proto/node.proto"], cwd=ROOT, check=True, timeout=60)
    fresh = sorted((tmp_path / "serving/rpc/pb").iterdir())
    assert len(fresh) == 3
    for file in fresh:
        assert file.read_text() == (ROOT / "serving/rpc/pb" / file.name).read_text(), file.name


def test_proto_is_no_package() -> None:
    assert not (ROOT / "proto" / "__init__.py").exists()
