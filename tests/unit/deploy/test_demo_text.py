"""The demo model's text and checkpoint folder: deterministic, answerable, small, well formed."""

import json
import re
from itertools import islice
from pathlib import Path

import jinja2
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks.demo_model import text
from deploy.config import load_cluster
from engine.weights.digest import BESIDE

FOLDER = Path(load_cluster().model)
FREE_WORDS = set(text.NUMBERS)


def read(name: str) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def words(content: str) -> list[str]:
    return re.findall(r"\w+", content)


def known_words() -> set[str]:
    pools = (text.NAMES, text.THINGS, text.COLOURS, text.PLACES, text.FOODS)
    return {word for pool in pools for word in pool}


def test_generator_follows_from_the_seed() -> None:
    assert text.fresh_prompts(3, 20) == text.fresh_prompts(3, 20)
    assert text.fresh_prompts(3, 20) != text.fresh_prompts(4, 20)
    first, second = (list(islice(text.training_documents(5, 4, 4), 20)) for _ in range(2))
    assert first == second


def test_every_kind_of_question_occurs() -> None:
    kinds = {prompt.kind for prompt in text.fresh_prompts(0, 400)}
    assert kinds >= {"has", "who-has", "colour", "where", "likes", "about", *text.LIST_TASKS}


def test_answers_stand_in_the_context() -> None:
    for prompt in text.fresh_prompts(1, 300):
        context = set(words(" ".join(message["content"] for message in prompt.messages)))
        facts = known_words().intersection(words(prompt.answer))
        assert facts <= context, prompt
        assert facts or FREE_WORDS.intersection(words(prompt.answer)), prompt


def test_a_fact_question_has_one_answer() -> None:
    for prompt in text.fresh_prompts(2, 300):
        if prompt.kind in ("has", "where", "likes", "about"):
            stated = " ".join(message["content"] for message in prompt.messages)
            assert prompt.answer.removeprefix("I read that ") in stated, prompt


def test_reverse_and_repeat_keep_the_items() -> None:
    for prompt in text.fresh_prompts(6, 400):
        asked = words(prompt.messages[-1]["content"].rpartition(":")[2])
        given = words(prompt.answer.rpartition(":")[2])
        if prompt.kind == "reverse":
            assert given == asked[::-1]
        if prompt.kind == "repeat":
            assert given[-len(asked) :] == asked


def test_chats_alternate_and_end_with_the_user() -> None:
    for prompt in text.fresh_prompts(7, 100):
        roles = [message["role"] for message in prompt.messages if message["role"] != "system"]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
        assert roles[-1] == "user"


@pytest.mark.parametrize("sample", ["Mia has the ball.", "héllo — 日本語\t🙂  x\r\n", "\x00\x7f߿"])
def test_tokenizer_keeps_any_utf8(tokenizer: Tokenizer, sample: str) -> None:
    assert tokenizer.decode(tokenizer.encode(sample).ids) == sample


def test_special_tokens_are_single_ids_and_end_generation(tokenizer: Tokenizer) -> None:
    turn_end, text_end = (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    assert tokenizer.encode("a<|im_end|>").ids[-1] == turn_end
    assert read("generation_config.json")["eos_token_id"] == [turn_end, text_end]
    assert read("config.json")["eos_token_id"] == turn_end
    assert read("tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_chat_template_renders_turns() -> None:
    source = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    rendered = jinja2.Template(source).render(messages=messages, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


def test_folder_is_small_and_complete() -> None:
    # A node that served it has left the digest of its weights there.
    files = [path for path in FOLDER.iterdir() if path.name != BESIDE]
    sizes = {path.name: path.stat().st_size for path in files}
    assert sizes.keys() == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) <= 5 * 1024 * 1024


def test_config_names_a_hybrid_model() -> None:
    config = read("config.json")
    assert config["model_type"] == "qwen3_5_text"
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert config["tie_word_embeddings"] is True
    positions = config["max_position_embeddings"]
    assert isinstance(positions, int) and positions >= 32768


def test_weights_match_the_config(tokenizer: Tokenizer) -> None:
    config = read("config.json")
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as weights:
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert embedding.get_dtype() == "F16"
        assert embedding.get_shape() == [config["vocab_size"], config["hidden_size"]]
    assert tokenizer.get_vocab_size() == config["vocab_size"]


def test_card_reports_measured_rates() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    rates = dict(re.findall(r"^\| ([\w/ ]+) \| ([\d.]+)% \|$", card, flags=re.MULTILINE))
    assert rates.keys() == {"nothing", "K/V", "conv states", "temporal states"}
    broken = (float(rate) for wiped, rate in rates.items() if wiped != "nothing")
    assert float(rates["nothing"]) > max(broken)
