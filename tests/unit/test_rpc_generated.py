"""The committed code is what the .proto text says, and `proto` stays free for the package of that
name."""

from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    include = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    source = ROOT / "proto" / "node.proto"
    mapping = f"-Iengine/rpc/pb={ROOT / 'proto'}"
    assert protoc.main(["protoc", mapping, f"-I{include}", *outputs, str(source)]) == 0
    fresh = sorted((tmp_path / "engine/rpc/pb").iterdir())
    assert len(fresh) == 3
    for file in fresh:
        assert file.read_text() == (ROOT / "engine/rpc/pb" / file.name).read_text(), file.name


def test_proto_is_no_package() -> None:
    assert not (ROOT / "proto" / "__init__.py").exists()
