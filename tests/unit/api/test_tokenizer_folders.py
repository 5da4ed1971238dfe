"""Model folders as people have them: tokens and templates in files beside tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from engine.errors import CheckpointError, ConfigError
from engine.model_configs.generation import read_eos_token_ids
from serving.api.chat_template import given_template
from serving.api.tokenizer import Tokenizer, load_tokenizer
from serving.rpc.tokenizer_files import tokenizer_files
from tests.support.api.api_double import (
    CHATML,
    ScriptedGenerator,
    running,
    tiny_serving,
    write_model_folder,
)

TEXT = "a <think>b</think> <img>c<|im_end|>"
TURN = [{"role": "user", "content": "hi"}]


def byte_level(folder: Path) -> int:
    write_model_folder(folder)
    return size_of(folder)


def byte_fallback(folder: Path) -> int:
    """As SentencePiece's tokenizers: a space is U+2581, and unknown characters are their bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abchi<>|"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.save(str(folder / "tokenizer.json"))
    return size_of(folder)


def size_of(folder: Path) -> int:
    return int(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size())


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text)


def entry(content: str, *, special: bool = False, **flags: bool) -> dict[str, Any]:
    others = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, "special": special, **others, **flags}


def files_of(kind: str, size: int) -> dict[str, Any]:
    """The files of one way to name tokens; new ids begin at `size`."""
    thoughts = {str(size): entry("<think>"), str(size + 1): entry("</think>", lstrip=True)}
    ways: dict[str, dict[str, Any]] = {
        "decoder": {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    **thoughts,
                    str(size + 2): entry("<img>", special=True, rstrip=True),
                },
                "eos_token": "<|im_end|>",
                "extra_special_tokens": {"image_token": "<img>"},
            }
        },
        "legacy": {
            "tokenizer_config.json": {},
            "added_tokens.json": {"<think>": size, "<img>": size + 1, "</think>": size + 2},
            "special_tokens_map.json": {
                "bos_token": {**entry("<think>"), "normalized": True},
                "eos_token": "<|im_end|>",
                "additional_special_tokens": ["<img>"],
                "image_token": "<img>",
            },
        },
        "names": {
            "tokenizer_config.json": {
                "eos_token": {"__type": "AddedToken", **entry("<|im_end|>")},
                "bos_token": "<s>",
                "image_token": "<img>",
                "additional_special_tokens": ["<think>", "</think>"],
            }
        },
    }
    return ways[kind]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("kind", ["decoder", "legacy", "names"])
def test_tokens_of_all_files_are_those_of_transformers(
    tmp_path: Path, make: Any, kind: str
) -> None:
    for name, content in files_of(kind, make(tmp_path)).items():
        write(tmp_path, name, content)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    ids = ours.encode(TEXT, add_special_tokens=True)
    assert list(ids) == oracle.encode(TEXT)
    for skips in (True, False):
        decoded = oracle.decode(ids, skip_special_tokens=skips)
        assert ours.decode(ids, skip_special_tokens=skips) == decoded
    assert "<|im_end|>" not in ours.decode(ids)
    assert ours.special_tokens == oracle.special_tokens_map
    assert ours.eos_token_id == oracle.eos_token_id
    # Grammars see the same tokens.
    core = tokenizers.Tokenizer.from_str(ours.to_json() or "")
    assert core.get_vocab() == oracle.get_vocab()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"9999": entry("<a>")}}, "id 9999"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": entry("<|im_end|>")}}, "id 7"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": entry("<a>")}}, "is no number"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "is no object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": 3}}, "for a token's text"),
        ("tokenizer_config.json", {"eos_token": 3}, "for a token's text"),
        ("tokenizer_config.json", {"extra_special_tokens": "<a>"}, "no list"),
        ("added_tokens.json", {"<a>": True}, "the id of '<a>' is True"),
        ("added_tokens.json", {"<a>": 9999}, "id 9999"),
        ("special_tokens_map.json", "[", "is not JSON"),
        ("special_tokens_map.json", {"eos_token": [1]}, "for a token's text"),
    ],
)
def test_files_that_contradict_each_other_are_refused(
    tmp_path: Path, name: str, content: Any, message: str
) -> None:
    byte_level(tmp_path)
    write(tmp_path, "tokenizer_config.json", {})
    write(tmp_path, name, content)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


def test_the_tokenizers_end_of_text_always_ends_an_answer(tmp_path: Path) -> None:
    byte_level(tmp_path)
    write(tmp_path, "config.json", {"eos_token_id": 5})
    end = load_tokenizer(tmp_path).eos_token_id
    assert end == 1
    assert read_eos_token_ids(tmp_path, 300, end) == (5, 1)
    write(tmp_path, "generation_config.json", {"eos_token_id": [1, 7]})
    assert read_eos_token_ids(tmp_path, 300, end) == (1, 7)
    write(tmp_path, "generation_config.json", {})
    write(tmp_path, "config.json", {})
    assert read_eos_token_ids(tmp_path, 300, end) == (1,)
    assert read_eos_token_ids(tmp_path, 300, 300) == ()


def rendered(tokenizer: Tokenizer, **extra: Any) -> str:
    ids = tokenizer.encode_chat(TURN, add_generation_prompt=False, extra={"tools": None, **extra})
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"chat_template.json": {"chat_template": "J"}}, "J", "J"),
        (
            {
                "chat_template.json": {"chat_template": "J"},
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "default", "template": "D"},
                        {"name": "tool_use", "template": "T"},
                    ]
                },
            },
            "D",
            "T",
        ),
        (
            {
                "tokenizer_config.json": {"chat_template": "D"},
                "chat_template.jinja": "F",
                "additional_chat_templates/tool_use.jinja": "T",
            },
            "F",
            "T",
        ),
    ],
)
def test_templates_come_from_any_of_their_files(
    tmp_path: Path, files: dict[str, Any], plain: str, with_tools: str
) -> None:
    byte_level(tmp_path)
    write(tmp_path, "tokenizer_config.json", {})
    for name, content in files.items():
        write(tmp_path, name, content)
    tokenizer = load_tokenizer(tmp_path)
    assert (rendered(tokenizer), rendered(tokenizer, tools=[{}])) == (plain, with_tools)
    assert tokenizer.tool_template == with_tools
    sent = tokenizer_files(tmp_path, None)
    assert sent.keys() >= files.keys()
    # A template of an option replaces them all, also at the proxy that is sent the files.
    assert rendered(load_tokenizer(tmp_path, "X"), tools=[{}]) == "X"
    assert tokenizer_files(tmp_path, "X").keys() - sent.keys() <= {"chat_template.jinja"}
    templates = [it for it in tokenizer_files(tmp_path, "X") if "chat_template" in it]
    assert templates == ["chat_template.jinja"]


def test_a_template_that_takes_parts_gets_parts(tmp_path: Path) -> None:
    byte_level(tmp_path)
    loop = "{% for p in messages[0].content %}{{ p.text }}{% endfor %}"
    assert rendered(load_tokenizer(tmp_path, loop)) == "hi"
    assert rendered(load_tokenizer(tmp_path, loop, "string")) == ""
    shown = "{{ messages[0].content | tojson }}"
    assert rendered(load_tokenizer(tmp_path, shown)) == '"hi"'
    assert rendered(load_tokenizer(tmp_path, shown, "openai")) == '[{"type": "text", "text": "hi"}]'


def test_the_template_of_an_option_is_a_file_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(CHATML)
    assert given_template(str(file)) == CHATML
    assert given_template("{{ 'é€' }}\\n") == "{{ 'é€' }}\n"
    long = "{# " + "x" * 9000 + " #}"
    assert given_template(long) == long
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for wrong in (tmp_path, tmp_path / "gone", tmp_path / "no-file", "{% for %}", ""):
        with pytest.raises(ConfigError, match="--chat-template"):
            given_template(str(wrong))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json"]
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str) -> None:
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=f"{name} is a link to .*nowhere, which is not"):
        load_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: Is a directory"):
        load_tokenizer(tmp_path)


async def test_the_tokenizer_is_told_where_an_option_says_so(tmp_path: Path) -> None:
    byte_level(tmp_path)
    # As transformers writes a length without limit.
    config = {"model_max_length": int(1e30), "eos_token": entry("<|im_end|>"), "chat_template": "a"}
    write(tmp_path, "tokenizer_config.json", config)
    tokenizer = load_tokenizer(tmp_path, "b")
    told = {}
    for is_told in (True, False):
        serving = tiny_serving(tokenizer, has_tokenizer_info=is_told)
        async with (
            running(ScriptedGenerator([]), serving) as base,
            aiohttp.ClientSession() as session,
            session.get(f"{base}/tokenizer_info") as reply,
        ):
            told[is_told] = reply.status, await reply.json()
    assert told[True] == (200, {**config, "eos_token": "<|im_end|>", "chat_template": "b"})
    assert told[False][0] == 404
