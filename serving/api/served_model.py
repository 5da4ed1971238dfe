"""The model that a server serves: names, limits, sampling defaults and tokenizer."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.distribution import VERSION
from engine.errors import CheckpointError
from engine.model_files import read_bytes
from engine.types import SamplingParams
from serving.api.reasoning import ThoughtSyntax, choose_thoughts
from serving.api.tokenizer import MAX_COMPOSED, TextLimit, Tokenizer
from serving.api.tool_syntaxes import ToolCallSyntax, choose_syntax
from serving.config import ServerConfig

MAX_BODY_BYTES = 16_777_216  # four million tokens of four bytes
OTHER_BYTES = 1_048_576
# Tokenizing takes a microsecond per character, two of the worst texts.
MAX_TEXT_CHARS = 4_194_304  # of all texts of a request
MAX_CUT_CHARS = 262_144  # of those that are cut or only counted
MAX_CHARS_PER_TOKEN = 8  # of the context, where these are more


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values used where a request is silent, from generation_config.json, as vLLM does."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None


@dataclass(slots=True, frozen=True)
class ServedModel:
    """Any served model name is accepted, the first is announced; `vocab_size` bounds token ids.

    Only nodes accept `kv_transfer_params`; the proxy ignores what clients send under that key.
    `tool_calls` is how the model writes calls of tools, `thoughts` how it marks what it thinks:
    None leaves them in the text. `grammar_binds_thoughts`: else grammars bind only what follows
    them. `strict_api` refuses unknown keys.
    """

    served_model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    enable_prompt_tokens_details: bool = False
    accept_kv_transfer_params: bool = False
    tool_calls: ToolCallSyntax | None = None
    thoughts: ThoughtSyntax | None = None
    grammar_binds_thoughts: bool = False
    strict_api: bool = False
    sse_keep_alive_interval: float = 0.0
    root: str = ""
    has_tokenizer_info: bool = False
    version: str = VERSION

    def with_options(self, config: ServerConfig) -> "ServedModel":
        """The same model, served as the options say."""
        return replace(
            self,
            enable_prompt_tokens_details=config.enable_prompt_tokens_details,
            tool_calls=choose_syntax(config.tool_call_parser, self.tokenizer.tool_template),
            thoughts=choose_thoughts(config.reasoning_parser, self.tokenizer),
            grammar_binds_thoughts=config.structured_outputs_config.enable_in_reasoning,
            strict_api=config.strict_api,
            sse_keep_alive_interval=config.sse_keep_alive_interval,
            has_tokenizer_info=config.enable_tokenizer_info_endpoint,
        )

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]

    def text_limit(self, *, must_fit: bool) -> TextLimit:
        """How long a prompt's text may be; one that is cut or only counted need not fit."""
        least = MAX_TEXT_CHARS if must_fit else MAX_CUT_CHARS
        most = max(least, MAX_CHARS_PER_TOKEN * self.max_model_len)
        return TextLimit(self.max_model_len, most, must_fit)


def max_body_bytes(served: ServedModel, *, num_prompts: int) -> int:
    """Bytes beyond which a body holds no prompt that fits, with room for everything else in it.

    One prompt may be made of the longest tokens and escaped throughout, 12 bytes for a character;
    several take 32 bytes per token. Where no token is the longest, the upper bound alone counts.
    """
    chars = served.tokenizer.chars_per_token
    if chars is None:
        return MAX_BODY_BYTES
    per_token = max(12 * MAX_COMPOSED * chars, 32 * num_prompts)
    return min(MAX_BODY_BYTES, OTHER_BYTES + served.max_model_len * per_token)


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Read generation_config.json of a model folder; no file means no defaults.

    Raises CheckpointError when the file is there and cannot be read.
    """
    path = folder / "generation_config.json"
    content = read_bytes(path)
    if content is None:
        return SamplingDefaults()
    try:
        defaults = msgspec.json.decode(content, type=SamplingDefaults)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    for name, value in msgspec.structs.asdict(defaults).items():
        if value is None or name not in SamplingParams.__struct_fields__:
            continue
        try:  # else every request that is silent about it would be refused
            msgspec.convert({name: value}, SamplingParams)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{path.name}: {name!r} is {value}: {error}") from error
    return defaults
