"""A Generator that follows a script, a tiny tokenizer, and a real server around them."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import uvicorn
from prometheus_client import CollectorRegistry, Counter
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.errors import TandemError, UnavailableError
from engine.types import FinishReason, GenerateOutput, GenerateRequest, TokenLogprob
from serving.api.access import Access
from serving.api.app import create_app
from serving.api.served_model import ServedModel
from serving.api.tokenizer import Tokenizer, load_tokenizer
from serving.http.callers import SingleKey

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
LINES = ("the quick brown fox jumps over the lazy dog", "hello hello world, stop here now")


TEXT = "the fox € stop here"


def write_model_folder(folder: Path) -> Path:
    """A folder with a byte-level BPE tokenizer of about 300 tokens and a ChatML template."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(LINES, trainer)
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tiny_tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(write_model_folder(folder))


def tiny_serving(tokenizer: Tokenizer, **changes: object) -> ServedModel:
    fields: dict[str, object] = {
        "served_model_names": ("tiny", "tiny-alias"),
        "max_model_len": 256,
        "vocab_size": 300,
        "tokenizer": tokenizer,
        "enable_prompt_tokens_details": True,
    }
    return ServedModel(**{**fields, **changes})  # type: ignore[arg-type]


def outputs_of(
    token_ids: Sequence[int], *, per_step: int = 1, **last: object
) -> list[GenerateOutput]:
    """One output per `per_step` tokens; the last one ends with `length` or as `last` says."""
    steps = [
        GenerateOutput(
            token_ids=tuple(token_ids[start : start + per_step]),
            logprobs=tuple(_logprob(token) for token in token_ids[start : start + per_step]),
            num_cached_tokens=3,
        )
        for start in range(0, len(token_ids), per_step)
    ]
    ending: dict[str, object] = {"finish_reason": FinishReason.LENGTH, **last}
    final = {name: getattr(steps[-1], name) for name in steps[-1].__struct_fields__}
    return [*steps[:-1], GenerateOutput(**{**final, **ending})]


def script_of(served: ServedModel, text: str, **last: object) -> list[GenerateOutput]:
    """The text, and a token that stops it unless `last` says otherwise."""
    ids = (*served.tokenizer.encode(text, add_special_tokens=False), 1)
    return outputs_of(ids, per_step=1, **{"finish_reason": FinishReason.STOP, **last})


def _logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, ((token, -0.5), (65, -math.inf)))


@dataclass(slots=True)
class ScriptedGenerator:
    """Plays `script` for every request, cut at max_tokens; remembers requests and what was cut."""

    script: Sequence[GenerateOutput]
    error: TandemError | None = None
    endless: bool = False
    unready: bool = False
    requests: list[GenerateRequest] = field(default_factory=list)
    open: int = 0
    cancelled: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        self.requests.append(request)
        self.open += 1
        done = False
        try:
            for output in self.script:
                self.started.set()
                await asyncio.sleep(0)
                yield output
            if self.error is not None:
                raise self.error
            if self.endless:
                await asyncio.Event().wait()
            done = True
        finally:
            self.open -= 1
            self.cancelled += not done and self.error is None

    async def check_health(self) -> None:
        if self.error is not None:
            raise self.error

    async def check_ready(self) -> tuple[str, ...]:
        if self.unready:
            raise UnavailableError("draining", retry_after_s=7)
        return ()


@asynccontextmanager
async def running(
    generator: ScriptedGenerator,
    served: ServedModel,
    *,
    api_key: str | None = None,
) -> AsyncIterator[str]:
    """Base address of a real server on a free port of the loopback."""
    registry = CollectorRegistry()
    Counter("tandem_probe", "for the test", registry=registry).inc()
    access = Access(None if api_key is None else SingleKey(api_key))
    app = create_app(generator, served, metrics_registry=registry, access=access)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # Not serve(): it looks at its exit flag ten times a second, which would be most of a test.
    await server.startup()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.force_exit = True
        await server.shutdown()
