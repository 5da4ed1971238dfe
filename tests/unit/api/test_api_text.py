"""Detokenizer, stop strings, tokenizer and chat template: text at the borders of tokens."""

import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine.errors import CheckpointError, InvalidRequestError, PromptTooLongError
from serving.api.chat_template import ChatTemplate
from serving.api.choice_text import Detokenizer, StopMatcher
from serving.api.schema import MAX_MESSAGES
from serving.api.tokenizer import PIECE_CHARS, TextLimit, TextTokenizer, Tokenizer, load_tokenizer
from tests.support.api.api_double import CHATML, tiny_tokenizer, write_model_folder

TEMPLATE = Path(__file__).parents[3] / "deploy/demo/model/chat_template.jinja"

NASTY = "plain € text 😀😀 \u00e9 e\u0301 \ufffd \ufffd\ufffd\ufffd\ufffd end 漢字"

DOUBLING = (
    "{{% set n = namespace(s='x') %}}"
    "{{% for a in range(60) %}}{{% set n.s = {twice} %}}{{% endfor %}}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("model"))


def pieces_of(
    tokenizer: Tokenizer, ids: tuple[int, ...], context: tuple[int, ...] = ()
) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode, context)
    pieces = [detokenizer.push(token) for token in ids]
    return [*pieces, detokenizer.flush()]


def test_pieces_add_up_and_no_piece_ends_in_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("€😀漢 ok" * 20, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == "€😀漢 ok" * 20
    assert not any("\ufffd" in piece for piece in pieces)


def test_replacement_characters_of_the_text_itself_survive(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(NASTY * 3, add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids)) == NASTY * 3


def test_any_bytes_decode_as_in_one_go_and_are_not_held_for_ever(tokenizer: Tokenizer) -> None:
    ids = tuple(random.Random(1).choices(range(2, 258), k=400))
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert len(pieces[-1]) <= 3


def byte_fallback() -> TextTokenizer:
    """As Gemma's and Llama's: what is no word is a run of tokens with a byte each."""
    words = {"▁": 0, "ok": 1, "<unk>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    core = tokenizers.Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(steps)
    return TextTokenizer(core)


def ids_of(text: str) -> tuple[int, ...]:
    """Bytes but for spaces and `ok`."""
    found: list[int] = []
    for part in re.split("( |ok)", text):
        named = {" ": [0], "ok": [1]}.get(part)
        found += [3 + byte for byte in part.encode()] if named is None else named
    return tuple(found)


@pytest.mark.parametrize("context", ["", "ok ", "ok 😀", "한국한국한국"])
def test_neighbours_that_are_spelled_in_bytes_are_both_whole(context: str) -> None:
    draw, spoken = random.Random(3), byte_fallback()
    texts = ["😀😀", "한국", "😀é ok", "한국어 ok 😀😀😀 é" * 12]
    texts += ["".join(draw.choices(["😀", "한", "é", " ", "ok"], k=40)) for _ in range(20)]
    for text in texts:
        pieces = pieces_of(spoken, ids_of(text), ids_of(context))
        assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    broken = pieces_of(spoken, (*ids_of("ok 😀"), 3 + 0xF0, *ids_of(" ok")), ids_of(context))
    assert "".join(broken).startswith("ok 😀") and broken[-2] == "ok"


WORDS = ["ok", " ", "x"]
CHARACTERS = st.sampled_from([*WORDS, "\ufffd", "é", "€", "😀", "\U000e0001", "\0", "👩\u200d🚀"])


@hypothesis.settings(max_examples=150)
@hypothesis.given(st.lists(CHARACTERS, max_size=30), st.sampled_from(["", "ok", "\ufffd😀", " é"]))
def test_any_text_in_bytes_is_whole(parts: list[str], context: str) -> None:
    text = "".join(parts)
    assert "".join(pieces_of(byte_fallback(), ids_of(text), ids_of(context))) == text


def is_within(some: str, text: str) -> bool:
    """True if `text` without some of its characters is `some`."""
    rest = iter(text)
    return all(char in rest for char in some)


BYTES = st.sampled_from([0xEF, 0xBF, 0xBD, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0xE2, 0xFF, 0x41])


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.lists(BYTES.map(lambda byte: 3 + byte) | st.sampled_from([0, 1]), max_size=60))
def test_of_broken_bytes_nothing_is_lost_nor_said_twice(ids: list[int]) -> None:
    """A run of bytes counts as broken as a whole, but what was shown of it stays shown."""
    spoken = byte_fallback()
    pieces = pieces_of(spoken, (*ids, 1))
    shown = "".join(pieces)
    assert shown.endswith("ok")
    assert is_within(spoken.decode((*ids, 1)).replace("\ufffd", ""), shown)
    valid = b"".join(map(spoken.token_bytes, ids)).decode(errors="ignore") + "ok"
    assert is_within(shown.replace("\ufffd", ""), valid)


def test_context_keeps_the_space_before_the_first_word() -> None:
    vocab = {"▁Hello": 0, "▁world": 1, "<unk>": 2}
    core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.decoder = decoders.Metaspace()
    spaced = TextTokenizer(core)
    assert "".join(pieces_of(spaced, (1, 1), context=(0,))) == " world world"
    assert spaced.token_text(1) == " world"


def test_a_decoder_without_spaces_of_its_own_is_followed() -> None:
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert "".join(pieces_of(TextTokenizer(core), (0, 1) * 40)) == " ".join("ab" * 40)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["stop"], "go on ststop here", "go on st", "stop"),
        (["aab"], "aaab", "a", "aab"),
        (["xyz", "y"], "wxyz", "wx", "y"),
        (["cde", "de"], "abcdef", "ab", "cde"),
        (["never"], "nevneve", "nevneve", None),
        (["\n\n"], "a\n\nb", "a", "\n\n"),
    ],
)
def test_stop_does_not_depend_on_how_the_text_is_cut(
    size: int, stops: list[str], text: str, shown: str, matched: str | None
) -> None:
    matcher = StopMatcher(stops)
    seen = ""
    for start in range(0, len(text), size):
        fed = matcher.feed(text[start : start + size])
        seen += fed.text
        if fed.stop:
            assert (seen, fed.stop) == (shown, matched)
            return
    assert (seen + matcher.flush(), None) == (shown, matched)


@hypothesis.given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    pieces=st.lists(st.tuples(st.text("abc", max_size=5), st.booleans()), max_size=12),
)
def test_stop_strings_are_found_as_by_definition(
    stops: list[str], pieces: list[tuple[str, bool]]
) -> None:
    """The match that ends first, then the longest; held is what may become one."""
    matcher = StopMatcher(stops)
    text, shown = "", ""
    for piece, armed in pieces:
        ends = range(len(text) + 1, len(text) + len(piece) + 1)
        text += piece
        found = [(end, -len(it), it) for end in ends for it in stops if text[:end].endswith(it)]
        fed = matcher.feed(piece, armed=armed)
        shown += fed.text
        if found and armed:
            end, length, stop = min(found)
            assert (shown, fed.stop) == (text[: end + length], stop)
            return
        sizes = (size for it in stops for size in range(len(it)) if text.endswith(it[:size]))
        assert (shown, fed.stop) == (text[: len(text) - max(sizes)], None)
    assert shown + matcher.flush() == text


def num_lines(work: Callable[[], object]) -> int:
    """Lines of Python that `work` runs, in all functions."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_stop_strings_that_nearly_match_everywhere_cost_the_same_at_any_length() -> None:
    """One keeps much held, in which the others almost begin at each character."""
    matcher = StopMatcher(["a" * 1023 + "b"] + [f"{'a' * size}b{'a' * 99}" for size in range(15)])
    first = num_lines(lambda: matcher.feed("a" * 16))
    matcher.feed("a" * 5000)
    assert num_lines(lambda: matcher.feed("a" * 16)) < 2 * first


def test_stop_can_be_shown_and_is_let_pass_while_not_armed() -> None:
    matcher = StopMatcher(["ab"], include=True)
    assert matcher.feed("ab a", armed=False) == ("ab ", None)
    assert matcher.feed("b c") == ("ab", "ab")


def test_text_that_can_begin_a_stop_string_is_held_back_and_no_more() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.feed("a<").text == "a"
    assert matcher.feed("/").text == ""
    assert matcher.feed("b").text == "</b"


def test_token_bytes_are_exact_for_parts_of_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == "€".encode()
    assert tokenizer.token_text(0) == "<|im_start|>"


def test_added_tokens_are_plain_text_whatever_their_letters(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_file(str(write_model_folder(tmp_path) / "tokenizer.json"))
    core.add_special_tokens(["<é>"])
    index = core.token_to_id("<é>")
    assert index is not None and TextTokenizer(core).token_bytes(index) == "<é>".encode()


def core_of(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(write_model_folder(folder) / "tokenizer.json"))


def test_texts_that_cannot_fit_are_refused_before_any_work(tmp_path: Path) -> None:
    core = core_of(tmp_path)
    core.normalizer = normalizers.NFC()
    tokenizer = TextTokenizer(core)
    longest = max(map(len, core.get_vocab()))
    assert tokenizer.chars_per_token == longest == len("<|im_start|>")
    limit = TextLimit(10, 1_000_000, must_fit=True)
    for fits in ("<|im_start|>" * 10, "e\u0301" * 5 * longest, "x" * 10 * longest):
        assert tokenizer.encode(fits, add_special_tokens=False, limit=limit)
    for too_long in ("x" * (10 * longest + 1), "\u00e9" * (40 * longest + 1), "e\u0301" * 99_999):
        told = f"length is 10 tokens.*{len(too_long)} characters"
        with pytest.raises(PromptTooLongError, match=told):
            tokenizer.encode(too_long, add_special_tokens=False, limit=limit)


class CountingTokenizer(TextTokenizer):
    """Counts the characters that are tokenized."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        super().__init__(core)
        self.num_chars = 0

    def _encoded(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        self.num_chars += len(text)
        return super()._encoded(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("text", ["a", "e\u0301\u0316", "\U0001f469\u200d", "漢", "\n x", "<|im_"])
def test_of_a_text_with_far_too_many_tokens_only_the_beginning_is_tokenized(
    tmp_path: Path, text: str
) -> None:
    core = core_of(tmp_path)
    core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    tokenizer = CountingTokenizer(core)
    assert tokenizer.chars_per_token is None
    long = text * (8 * PIECE_CHARS // len(text))
    with pytest.raises(PromptTooLongError, match="the first 262144 of them are"):
        tokenizer.encode(long, add_special_tokens=False, limit=TextLimit(1000, 10**7, True))
    assert tokenizer.num_chars == PIECE_CHARS
    with pytest.raises(PromptTooLongError, match="at most 9999 are taken"):
        tokenizer.encode(long, add_special_tokens=False, limit=TextLimit(1000, 9999, False))
    assert tokenizer.num_chars == PIECE_CHARS


def test_a_long_text_of_few_tokens_fits(tmp_path: Path) -> None:
    tokenizer = CountingTokenizer(core_of(tmp_path))
    text = "<|im_start|>" * 30_000
    limit = TextLimit(30_000, 10**6, must_fit=True)
    assert len(tokenizer.encode(text, add_special_tokens=False, limit=limit)) == 30_000
    assert tokenizer.num_chars == 2 * len(text)


def test_accents_cost_no_more_than_their_number(tmp_path: Path) -> None:
    """Python sorts a run of accents by insertion, with all other threads waiting."""
    core = core_of(tmp_path)
    core.normalizer = normalizers.NFC()
    tokenizer = TextTokenizer(core)

    def cost_of(num_accents: int) -> float:
        text = "e" + "\u0301" * num_accents + "\u0316" * num_accents
        limit = TextLimit(num_accents // 10, 10**7, must_fit=True)
        began = time.thread_time()
        assert tokenizer.encode(text, add_special_tokens=False, limit=limit)
        return time.thread_time() - began

    assert cost_of(20_000) < 20 * max(cost_of(2000), 0.005)


def test_where_tokens_swallow_any_number_of_characters_no_text_is_too_long(tmp_path: Path) -> None:
    swallowing = [core_of(tmp_path) for _ in range(4)]
    swallowing[0].normalizer = normalizers.Strip()
    swallowing[1].normalizer = normalizers.Replace(tokenizers.Regex(" +"), " ")
    swallowing[2].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    swallowing[3].add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    unknown = tokenizers.Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    for core in (*swallowing, unknown):
        tokenizer = TextTokenizer(core)
        assert tokenizer.chars_per_token is None
        limit = TextLimit(5, 10_000, must_fit=True)
        ids = tokenizer.encode("a" + " " * 1000, add_special_tokens=False, limit=limit)
        assert core is swallowing[3] or len(ids) <= 5


def test_other_threads_go_on_while_a_long_text_is_tokenized_and_detokenized(
    tokenizer: Tokenizer,
) -> None:
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.wait(0.001):
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    ticking = threading.Thread(target=tick)
    ticking.start()
    started = time.perf_counter()
    ids = tokenizer.encode("hello world " * 200_000, add_special_tokens=False)
    tokenizer.decode(ids)
    took = time.perf_counter() - started
    done.set()
    ticking.join()
    assert max(gaps) < took / 3


def test_special_tokens_are_left_out_of_text(tokenizer: Tokenizer) -> None:
    ids = (0, *tokenizer.encode("hello", add_special_tokens=False), 1)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


def test_folder_without_tokenizer_serves_token_ids_only(tmp_path: Path) -> None:
    bare = load_tokenizer(tmp_path)
    assert bare.decode([1, 2]) == ""
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        bare.encode("a", add_special_tokens=True)


def test_template_file_goes_before_config_and_none_is_an_error_only_when_used(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }}")
    turn = [{"role": "user", "content": "hi"}]
    made = load_tokenizer(tmp_path)
    ids = made.encode_chat(turn, add_generation_prompt=True, extra={})
    assert made.decode(ids, skip_special_tokens=False) == "<|im_end|>hi"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequestError, match="no chat template"):
        load_tokenizer(tmp_path).encode_chat(turn, add_generation_prompt=True, extra={})


def test_broken_files_are_named(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)
    for source in ("{% for %}", "{{ 'x' | center(2 * 10**9) }}"):
        with pytest.raises(CheckpointError, match="Jinja"):
            ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}",
            "too long",
        ),
        ("{% macro m(n) %}{{ m(n-1) ~ m(n-1) if n }}{% endmacro %}{{ m(60) }}", "too long"),
        ("{% for a in range(9999) %}xxxxxxxxxxxxxxxxxxxx{% endfor %}", "grows beyond 100000"),
        (DOUBLING.format(twice="n.s ~ n.s"), "grows beyond 100000"),
        (DOUBLING.format(twice="n.s + n.s"), "grows beyond 100000"),
        ("{{ 'x' * 999999999999 }}", "grows beyond 100000"),
        ("{{ 9 ** 99999999 }}", "grows beyond 100000"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ lipsum(n=300000) }}", "'lipsum' is undefined"),
        ("{{ 'x'.rjust(2 * 10**9) }}", "unsafe"),
        ("{{ '{:>2000000000}'.format('x') }}", "wide"),
        ("{{ '{:>{w}}'.format('x', w=2 * 10**9) }}", "computed width"),
        ("{{ '%2000000000d' % 1 }}", "wide"),
        ("{{ '%*d' % (2 * 10**9, 1) }}", "computed width"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[9].content.x }}", "no element 9"),
    ],
)
def test_runaway_and_refusing_templates_end_in_an_error(source: str, reason: str) -> None:
    template = ChatTemplate(source, max_chars=100_000, max_seconds=0.3)
    with pytest.raises(InvalidRequestError, match=f"chat template refused.*{reason}"):
        template.render([{"role": "user", "content": "x"}])


LOOKS_BACK = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages[::-1] %}"
    "{%- if message.role == 'user' %}{%- set ns.last = messages | length - 1 - loop.index0 %}"
    "{%- endif %}{%- endfor %}{{ ns.last }}"
)
LOOKS_AHEAD = "{% for m in messages %}{% for n in messages[loop.index0:] %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("source", [CHATML, LOOKS_BACK, TEMPLATE.read_text()])
def test_templates_take_time_by_the_number_of_messages(source: str) -> None:
    template = ChatTemplate(source)
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]

    def cost_of(num_turns: int) -> int:
        return num_lines(lambda: template.render(turns * (num_turns // 2), extra={"tools": None}))

    assert cost_of(1000) < 20 * cost_of(100)


def test_a_template_that_looks_ahead_at_each_message_is_stopped() -> None:
    template = ChatTemplate(LOOKS_AHEAD, max_seconds=0.2)
    turn = {"role": "user", "content": "a"}
    assert template.render([turn] * 10) == ""
    with pytest.raises(InvalidRequestError, match=r"more than 0.2 s: send fewer messages"):
        template.render([turn] * MAX_MESSAGES)


def test_json_in_templates_takes_the_options_of_transformers() -> None:
    """`json.dumps` of sorted keys, as templates of several families write tools."""
    options = "ensure_ascii=True, separators=(',', ':'), sort_keys=True"
    source = f"{{{{ messages[0] | tojson({options}) }}}}{{{{ messages[0] | tojson(indent=1) }}}}"
    turn = {"b": "é", "a": [1, 2]}
    rendered = ChatTemplate(source).render([turn])
    assert rendered == '{"a":[1,2],"b":"\\u00e9"}' + json.dumps(turn, indent=1, ensure_ascii=False)


def test_template_knows_what_model_templates_use() -> None:
    source = (
        "{%- for m in messages -%}{%- if loop.first -%}{%- continue -%}{%- endif -%}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{{ '~' ~ thinking ~ '<' }}"
        "{%- endfor -%}{{ strftime_now('%Y') | length }}"
    )
    turns = [{"content": "a"}, {"content": "<é>"}]
    assert ChatTemplate(source).render(turns, extra={"thinking": False}) == '"<é>"~False<4'
