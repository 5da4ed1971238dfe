"""Keys of vLLM and of OpenAI's older endpoint: what each turns a request into."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import InvalidRequestError, PromptTooLongError
from serving.api.plan import Plan, plan_chat, plan_completion
from serving.api.served_model import ServedModel
from serving.api.tokenizer import load_tokenizer
from tests.support.api.api_double import tiny_serving, write_model_folder

SERVING = {"strict_api": True}
TURN = [{"role": "user", "content": "hello"}]


def complete(served: ServedModel, **body: Any) -> Plan:
    return plan_completion(msgspec.json.encode({"prompt": [1, 2, 3], **body}), served)


def chat(served: ServedModel, **body: Any) -> Plan:
    return plan_chat(msgspec.json.encode({"messages": TURN, **body}), served)


def test_prompts_are_cut_on_the_left(served: ServedModel) -> None:
    long = list(range(290))
    for most, kept in ((3, long[-3:]), (256, long[-256:]), (-1, long[-240:])):
        if most == 256:
            with pytest.raises(InvalidRequestError, match="maximum context length"):
                complete(served, prompt=long, truncate_prompt_tokens=most)
            continue
        plan = complete(served, prompt=long, truncate_prompt_tokens=most, max_tokens=16)
        assert list(plan.prompt_of(0)) == kept
    text = "hello world " * 100
    whole = served.tokenizer.encode(text, add_special_tokens=True)
    assert complete(served, prompt=text, truncate_prompt_tokens=9).prompt_of(0) == whole[-9:]


def test_an_echo_repeats_what_was_sent_and_asks_for_its_logprobs(served: ServedModel) -> None:
    plan = complete(served, prompt=["the fox", "jumps"], n=2, echo=True, logprobs=1, max_tokens=0)
    assert [plan.echo_of(choice) for choice in range(4)] == ["the fox"] * 2 + ["jumps"] * 2
    assert plan.is_echo_only
    assert {(it.sampling.max_tokens, it.sampling.prompt_logprobs) for it in plan.requests} == {
        (1, 1)
    }
    ids = served.tokenizer.encode("the fox jumps", add_special_tokens=False)
    assert complete(served, prompt=ids, echo=True).echo_of(0) == "the fox jumps"
    assert complete(served, echo=True).requests[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("max_tokens", [256, 999])
def test_outputs_that_leave_no_room_for_a_cut_prompt_are_named(
    served: ServedModel, max_tokens: int
) -> None:
    message = f"maximum context length is 256 .*max_tokens={max_tokens}"
    with pytest.raises(PromptTooLongError, match=message) as caught:
        complete(served, truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert caught.value.param == "max_tokens"


def test_bad_words_are_tokens_with_and_without_a_space(served: ServedModel) -> None:
    words = complete(served, bad_words=["hello", " quick"]).requests[0].sampling.bad_words
    encode = served.tokenizer.encode
    texts = ("hello", " hello", "quick", " quick")
    assert [it.token_ids for it in words] == [encode(t, add_special_tokens=False) for t in texts]


def test_a_final_message_is_continued(served: ServedModel) -> None:
    turns = [*TURN, {"role": "assistant", "content": "the quick "}]
    plan = chat(served, messages=turns, continue_final_message=True)
    text = served.tokenizer.decode(plan.prompt_of(0), skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nthe quick ")
    with pytest.raises(InvalidRequestError, match="last message with text"):
        chat(
            served, messages=[*TURN, {"role": "user", "content": " "}], continue_final_message=True
        )

    with pytest.raises(InvalidRequestError, match="exclude each other"):
        chat(served, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize("content", ["|", "<|im_end|>", "im", "assistant", "the end|"])
def test_a_continued_message_that_looks_like_its_end_marker_is_kept(
    served: ServedModel, content: str
) -> None:
    turns = [*TURN, {"role": "assistant", "content": content}]
    plan = chat(served, messages=turns, continue_final_message=True)
    text = served.tokenizer.decode(plan.prompt_of(0), skip_special_tokens=False)
    assert text.endswith(f"<|im_start|>assistant\n{content}")


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ messages[-1].content | trim }}<|im_end|>\n", "the quick"),
        ("{{ messages[-1].content }}<|im_end|>\n", " the quick \n"),
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_template_may_trim_what_is_continued(
    tmp_path: Path, template: str, prompt: str | None
) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    served = tiny_serving(load_tokenizer(folder))
    turns = [*TURN, {"role": "assistant", "content": " the quick \n"}]
    if prompt is None:
        with pytest.raises(InvalidRequestError, match="template writes"):
            chat(served, messages=turns, continue_final_message=True)
        return
    plan = chat(served, messages=turns, continue_final_message=True)
    assert served.tokenizer.decode(plan.prompt_of(0), skip_special_tokens=False) == prompt
