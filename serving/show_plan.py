"""`python -m serving.show_plan MODEL`: how an arena would be cut for a model; starts no node."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, get_type_hints

import msgspec
import typer
from msgspec import Meta

from engine.errors import ConfigError, TandemError
from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.report import content_report, plan_report, tier_report
from engine.model_files import resolve_folder
from engine.safetensors_headers import read_headers
from serving.cli import command_app
from serving.config import DEFAULTS, Config, NodeConfig
from serving.memory_plan import Batch, memory_report, plan_memory

OF_A_NODE: Final = (
    "model",
    "dtype",
    "device",
    "block_size",
    "hash_block_size",
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
)
"""Its options that change what memory holds."""
SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {"": 1, **{f"{letter}B": 1000 ** (n + 1) for n, letter in enumerate("KMGT")}}
    | {f"{letter}iB": 1024 ** (n + 1) for n, letter in enumerate("KMGT")}
)
BYTES: Final = r"([0-9]+(?:\.[0-9]+)?)([KMGT]i?B)?"
TIER_BYTES: Final = 64 << 30


class _Own(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tier_bytes: Annotated[
        int, Meta(ge=1, description="Bytes of an OffloadConnector's host or disk tier.")
    ] = TIER_BYTES
    device_memory: Annotated[
        str,
        Meta(
            description="Plan for a device with so much free memory, as 141GB or 131GiB, that need "
            "not be here. Default: what is free on --device.",
        ),
    ] = ""


_HINTS = get_type_hints(NodeConfig, include_extras=True)
PlanConfig: type[Any] = msgspec.defstruct(
    "PlanConfig",
    [(name, _HINTS[name], getattr(DEFAULTS, name)) for name in OF_A_NODE],
    bases=(_Own,),
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
)


def plan(node: NodeConfig, *, tier_bytes: int = TIER_BYTES, device_memory: str = "") -> None:
    """Prints what fits an arena, a token's bytes, a state's and a hand-over's, and tiers.

    Of a device also what is on it, from the headers of the weights' files: none is loaded. Raises
    ConfigError for a device that is not here and whose memory is not given, and CheckpointError.
    """
    if device_memory and node.device == "cpu":
        raise ConfigError("--device-memory needs a --device that is not the CPU")
    folder = resolve_folder(node.model)
    config = read_config(folder, node.dtype, device=node.device)
    arena = plan_arena(
        config.groups,
        node.block_size,
        node.kv_cache_memory_bytes,
        hash_block_size=node.hash_block_size,
    )
    positions = config.max_position_embeddings
    reports = [
        plan_report(arena, positions),
        content_report(arena, positions),
        tier_report(arena, tier_bytes, positions),
    ]
    if node.device != "cpu":
        available = bytes_of(device_memory) if device_memory else _free_bytes(node.device)
        longest = min(node.max_model_len or positions, arena.longest_sequence(positions))
        batch = Batch.of(node, max_model_len=longest)
        memory = plan_memory(config, read_headers(folder), arena, batch=batch)
        reports.append(memory_report(memory, node.device, available))
    typer.echo("\n".join(reports))


def bytes_of(text: str) -> int:
    """Of a number with a unit, as 141GB or 131.5GiB, or without one. Raises ConfigError."""
    found = re.fullmatch(BYTES, text)
    if found is None:
        raise ConfigError(f"--device-memory: {text!r} is no number of bytes, as 141GB or 131GiB")
    number, unit = found.groups("")
    return int(float(number) * SIZES[unit])


def _free_bytes(device: str) -> int:
    # Here and not above: torch takes a second, and a plan without a card does not need it.
    from engine.arena import device_memory

    return device_memory(device)[0]


def main(load: Callable[[], Any]) -> None:
    """Prints the plan of the options that `load` gives, or one line of what is wrong."""
    try:
        given = load()
        node = NodeConfig(**{name: getattr(given, name) for name in OF_A_NODE})
        plan(node, tier_bytes=given.tier_bytes, device_memory=given.device_memory)
    except TandemError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


app = command_app(PlanConfig, main, "Show how an arena would be cut for a model; starts no node.")

if __name__ == "__main__":
    app()
