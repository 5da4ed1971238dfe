"""A node that cannot serve says so in one line, before it has loaded anything."""

import json
import re
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from connector.registry import builder_of
from engine.errors import ConfigError, TandemError
from serving.config import NodeConfig
from serving.node import limits
from serving.node.connector import NodeConnector, NodeParts
from serving.node.server import NodeServer
from serving.show_plan import app, plan
from tests.support.nodes.cluster import BASE, transfer_config
from tests.support.nodes.processes import NODE_FLAGS, STOP_S, ServerProcess

Damage = Callable[[Path], object]
DEEP = '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}"


def text(name: str, content: str | bytes) -> Damage:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def value(name: str, key: str, new: object) -> Damage:
    def change(folder: Path) -> None:
        file = folder / name
        fields = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**fields, key: new}))

    return change


def no_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


BROKEN: dict[str, tuple[Damage, str]] = {
    "no tokenizer": (text("tokenizer.json", "{}"), r"tokenizer\.json is no tokenizer"),
    "deep tokenizer": (text("tokenizer.json", DEEP), r"tokenizer\.json is nested too deeply"),
    "template": (text("chat_template.jinja", b"a\xff"), r"chat_template\.jinja is not UTF-8"),
    "deep config": (text("config.json", DEEP), r"config\.json is nested too deeply"),
    "folder": (no_file, r"config\.json cannot be read: Is a directory"),
    "context": (
        value("config.json", "max_position_embeddings", 0),
        r"config\.json: 'max_position_embeddings' is 0, expected a number from 1",
    ),
    "NaN": (value("config.json", "rms_norm_eps", float("nan")), r"config.*'rms_norm_eps' is nan"),
    "inf": (
        value("config.json", "rms_norm_eps", float("inf")),
        r"config\.json: 'rms_norm_eps' is inf",
    ),
    "temperature": (
        value("generation_config.json", "temperature", -5),
        r"generation_config\.json: 'temperature' is -5",
    ),
    "eos": (
        value("generation_config.json", "eos_token_id", 99_999),
        r"generation_config\.json: 'eos_token_id' 99999 is outside 0 \.\. 511",
    ),
}


@pytest.fixture
def folder(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A model without weights: whoever loads them first gives another error."""
    shutil.copytree(checkpoints["qwen3"], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    return tmp_path / "model"


async def refusal(folder: Path, **changes: object) -> TandemError:
    config = replace(BASE, model=str(folder), kv_transfer_config=transfer_config(), **changes)
    with pytest.raises(TandemError) as caught:
        await NodeServer(config, "decode", builder_of).start()
    return caught.value


@pytest.mark.parametrize("what", BROKEN)
async def test_what_a_folder_cannot_mean_is_named(what: str, folder: Path) -> None:
    damage, message = BROKEN[what]
    damage(folder)
    assert re.search(message, str(await refusal(folder)))


async def test_options_are_judged_before_anything_is_loaded(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flag, option in (("--port", {"port": port}), ("--grpc-port", {"grpc_port": port})):
            error = await refusal(folder, **option)
            assert f"{flag}: cannot listen on 127.0.0.1:{port}: Address already" in str(error)
    assert "--max-model-len 100000 is more" in str(await refusal(folder, max_model_len=100_000))
    error = await refusal(folder, kv_cache_memory_bytes=10**13)
    assert re.search(r"arena of 9,9\S+ bytes is asked for, and [\d,]+ bytes", str(error))
    assert isinstance(error, ConfigError)
    error = await refusal(folder, device="cuda:99")
    assert re.search(r"--device cuda:99: torch \S+ finds \d+ CUDA devices here", str(error))
    assert "safetensors" in str(await refusal(folder))


async def test_a_connector_that_cannot_be_made_ends_the_load(checkpoints: dict[str, Path]) -> None:
    def refuse(parts: NodeParts) -> NodeConnector:
        raise ConfigError("no such transport")

    config = replace(BASE, model=str(checkpoints["qwen3"]))
    with pytest.raises(ConfigError, match="no such transport"):
        await NodeServer(config, "decode", lambda _: refuse).start()
    assert not [it for it in threading.enumerate() if it.name.startswith("weights")]


def test_a_process_ends_with_2_and_one_line(folder: Path, tmp_path: Path) -> None:
    value("generation_config.json", "temperature", -5)(folder)
    node = ServerProcess.launch(tmp_path / "log", "decode_node", str(folder), *NODE_FLAGS)
    assert node.process.wait(STOP_S) == 2
    (line,) = node.said.splitlines()
    assert line.startswith("error: generation_config.json: 'temperature' is -5")


async def test_an_arena_that_a_device_has_no_room_for_is_refused_before_the_load(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2 << 30
    monkeypatch.setattr(limits, "device_memory", lambda device: (free, 80 << 30))
    monkeypatch.setattr(NodeServer, "_load", lambda *_: pytest.fail("the weights are loaded"))
    asked = {"device": "cuda", "kv_cache_memory_bytes": 2 << 30}
    error = str(await refusal(checkpoints["qwen3"], **asked))
    found = re.search(
        r"arena of [\d,]+ bytes does not fit cuda beside weights of ([\d,]+) and ([\d,]+) for .*: "
        r"2,147,483,648 of 85,899,345,920 bytes are free; at most (\d+) fit",
        error,
    )
    assert found, error
    weights, others, most = (int(number.replace(",", "")) for number in found.groups())
    stored = (checkpoints["qwen3"] / "model.safetensors").stat().st_size
    assert 0.9 * stored < weights < stored and weights + others + most == free
    # So many do fit: the next thing that a start does is to load.
    asked["kv_cache_memory_bytes"] = most
    config = replace(BASE, model=str(checkpoints["qwen3"]), **asked)
    with pytest.raises(pytest.fail.Exception, match="the weights are loaded"):
        await NodeServer(config, "decode", builder_of).start()
    free = 1 << 29
    error = str(await refusal(checkpoints["qwen3"], device="cuda"))
    assert "no arena fits: free memory of the device, or lower --max-num" in error


def test_the_plan_says_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value("config.json", "dtype", "float16")(folder)
    # 672 blocks of 16 tokens, in 16 bits about twice as many; 400 tokens take 25 of them.
    for dtype, tokens in (("auto", 10_752), ("float32", 10_752), ("float16", 21_760)):
        node = NodeConfig(model=str(folder), kv_cache_memory_bytes=16 << 20)
        plan(replace(node, dtype=dtype))
        said = capsys.readouterr().out
        assert f"room for one sequence of {tokens:,} tokens, or {tokens // 400} of 400" in said
        assert "bytes on" not in said


def run_plan(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output


def test_the_plan_of_a_device_says_what_is_left(checkpoints: dict[str, Path]) -> None:
    words = [str(checkpoints["qwen3_5"]), "--device", "cuda:1", "--device-memory"]
    code, said = run_plan(*words, "4GiB", "--kv-cache-memory-bytes", str(2 << 30))
    numbers = {
        name.strip(): int(number.replace(",", ""))
        for name, number in re.findall(r"^    ([^\d\n]+?[\d,]*)  +([\d,]+)$", said, re.M)
    }
    free = 4 << 30
    parts = "weights", "arena", "decode graphs, estimated", "logits, estimated"
    others = "the largest prefill chunk, estimated", "CUDA, libraries and fragments"
    assert code == 0 and numbers["all of it"] == sum(numbers[it] for it in (*parts, *others))
    assert numbers[f"left of {free:,}"] == free - numbers["all of it"]
    room = numbers["arena"] + numbers[f"left of {free:,}"]
    assert numbers["the largest arena that fits"] == room
    code, said = run_plan(*words, "2147.5MB", "--kv-cache-memory-bytes", str(2 << 30))
    assert code == 0 and "missing from 2,147,500,000" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "cuda:99"), r"--device cuda:99: torch \S+ finds \d+ CUDA devices here"),
        (("--device", "cuda", "--device-memory", "80XB"), "'80XB' is no number of bytes"),
        (("--device-memory", "80GB"), "--device-memory needs a --device that is not the CPU"),
        (("--device", "tpu"), "device"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(
    checkpoints: dict[str, Path], words: tuple[str, ...], message: str
) -> None:
    code, said = run_plan(str(checkpoints["qwen3"]), *words)
    assert code == 2 and re.search(rf"^error: .*{message}", said)
