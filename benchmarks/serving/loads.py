"""The load of each run: from a file, of random token ids, or of the demo model's kind of text."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from benchmarks.demo_model.text import NAMES, story
from benchmarks.load.request import GREEDY, Request, read_requests, sessions_of
from benchmarks.serving.options import ServingOptions, TargetOptions
from benchmarks.support.family_models import SHARED
from benchmarks.workloads.files import (
    REQUESTS,
    SHAREGPT,
    format_of,
    read_conversations,
    read_trace,
)
from benchmarks.workloads.traces import SAFE_IDS, requests_of
from engine.errors import ConfigError

PROMPT_STORIES = 5


def load_of(options: ServingOptions, count: int) -> list[Request]:
    """`count` sessions at most, the first of the same ones each time; raises ConfigError."""
    try:
        if options.workload:
            load = first_sessions(_read(options), count)
        else:
            load = (_random_ids if options.tokenizer else _stories)(options, count)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return sampled(load, options)


def sampled(requests: Sequence[Request], options: TargetOptions) -> list[Request]:
    """With --temperature and --extra-body."""
    given = options.sampling()
    return [msgspec.structs.replace(one, sampling={**one.sampling, **given}) for one in requests]


def ids_of(options: TargetOptions) -> Sequence[int]:
    """Token ids of prompts; an own cluster's random model knows all of its own.

    Raises ConfigError.
    """
    if options.tokenizer:
        return vocabulary_of(options.tokenizer)
    return SAFE_IDS if options.target else range(2, SHARED["vocab_size"])


def _read(options: ServingOptions) -> list[Request]:
    """Requests of a file, or of a trace's records, whose prompts are ids of the tokenizer."""
    file, folder = Path(options.workload), options.tokenizer
    kind = format_of(file)
    if kind == SHAREGPT:
        return read_conversations(file, counter_of(folder) if folder else None)
    if kind != REQUESTS:
        return requests_of(read_trace(file), vocabulary_of(folder) if folder else SAFE_IDS)
    if folder:
        raise ConfigError(f"{file} has its own prompts: give --workload or --tokenizer, not both")
    return read_requests(file)


def counter_of(folder: str) -> Callable[[str], int]:
    """How many tokens a text has for the tokenizer.json in `folder`; raises ConfigError."""
    tokenizer = _tokenizer(folder)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def vocabulary_of(folder: str) -> list[int]:
    """All ids of the tokenizer.json in `folder` but special ones; raises ConfigError."""
    tokenizer = _tokenizer(folder)
    special = tokenizer.get_added_tokens_decoder().keys()
    return sorted(set(tokenizer.get_vocab().values()) - special)


def _tokenizer(folder: str) -> Tokenizer:
    try:
        return Tokenizer.from_str((Path(folder) / "tokenizer.json").read_text())
    except OSError as error:
        raise ConfigError(f"--tokenizer {folder}: {error}") from error


def first_sessions(requests: list[Request], count: int) -> list[Request]:
    """All requests of the first `count` sessions, in the order of the load."""
    places = sorted(place for session in sessions_of(requests)[:count] for place in session)
    return [requests[place] for place in places]


def _stories(options: ServingOptions, count: int) -> list[Request]:
    draw = random.Random(0)
    return [
        Request(
            prompt=" ".join(story(draw, draw.choice(NAMES))[0] for _ in range(PROMPT_STORIES)),
            max_tokens=options.output_len,
        )
        for _ in range(count)
    ]


def _random_ids(options: ServingOptions, count: int) -> list[Request]:
    ids = vocabulary_of(options.tokenizer)
    draw = random.Random(0)
    prefix = draw.choices(ids, k=options.random_prefix_len)
    return [
        Request(
            prompt=(*prefix, *draw.choices(ids, k=options.random_input_len)),
            max_tokens=options.output_len,
            # Such answers are hardly text: servers differ in how they show half characters.
            sampling={**GREEDY, "return_token_ids": True},
        )
        for _ in range(count)
    ]
