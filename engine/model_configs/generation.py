"""The token ids that end a sequence, read from a model folder. Torch-free."""

from pathlib import Path

from engine.errors import CheckpointError
from engine.model_configs.config_reader import ConfigReader
from engine.model_files import read_object


def read_eos_token_ids(
    folder: Path, vocab_size: int, of_tokenizer: int | None = None
) -> tuple[int, ...]:
    """Reads generation_config.json, else config.json or its text part; may be empty.

    The id of the tokenizer's `eos_token` always counts too, as in vLLM: copies of a model often
    lack the first file, and the second may name another token than chats end with. Raises
    CheckpointError for broken files, mistyped ids and those outside the vocabulary.
    """
    config = ConfigReader.from_folder(folder)
    path = folder / "generation_config.json"
    fields = read_object(path)
    readers = [] if fields is None else [ConfigReader(fields, str(path))]
    sources = [*readers, config, config.text_part()]
    found = next(filter(None, (_eos(source, vocab_size) for source in sources)), ())
    # No logit stands for a token beyond the vocabulary, so that one never comes.
    if of_tokenizer is None or of_tokenizer in found or of_tokenizer >= vocab_size:
        return found
    return (*found, of_tokenizer)


def _eos(reader: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    """`eos_token_id` as a tuple: it may be missing, one id or a list of ids."""
    value = reader.fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(
            f"{reader.source}: 'eos_token_id' is {value!r}, expected one id or a list of ids"
        )
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise CheckpointError(
            f"{reader.source}: 'eos_token_id' {outside[0]} is outside 0 .. {vocab_size - 1}"
        )
    return tuple(ids)
