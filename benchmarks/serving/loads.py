"""The load of each run: from a file, of random token ids, or of the demo model's kind of text."""

import random
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from benchmarks.demo_model.text import NAMES, story
from benchmarks.load.request import GREEDY, Request, read_requests, sessions_of
from benchmarks.serving.options import ServingOptions
from engine.errors import ConfigError

PROMPT_STORIES = 5


def load_of(options: ServingOptions, count: int) -> list[Request]:
    """`count` sessions at most, the first of the same ones each time; raises ConfigError."""
    try:
        if options.workload:
            return _first_sessions(read_requests(Path(options.workload)), count)
        if options.tokenizer:
            return _random_ids(options, count)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return _stories(options, count)


def salted(requests: list[Request], salt: str) -> list[Request]:
    """The same requests, whose prefixes no earlier run has cached."""
    return [
        msgspec.structs.replace(request, sampling={**request.sampling, "cache_salt": salt})
        for request in requests
    ]


def _first_sessions(requests: list[Request], count: int) -> list[Request]:
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
    file = Path(options.tokenizer) / "tokenizer.json"
    tokenizer = Tokenizer.from_str(file.read_text())
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items()}
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
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
