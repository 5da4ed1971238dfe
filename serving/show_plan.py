"""`python -m serving.show_plan MODEL`: how an arena would be cut for a model; starts no node."""

from typing import Annotated

import typer

from engine.errors import TandemError
from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.report import content_report, plan_report, tier_report
from engine.model_files import resolve_folder
from serving.cli import option
from serving.config import DEFAULTS, NodeConfig

TierBytes = Annotated[
    int, typer.Option(min=1, help="Bytes of an OffloadConnector's host or disk tier.")
]


def plan(
    model: Annotated[str, option(NodeConfig, "model")],
    block_size: Annotated[int, option(NodeConfig, "block_size")] = DEFAULTS.block_size,
    *,
    hash_block_size: Annotated[
        int | None, option(NodeConfig, "hash_block_size")
    ] = DEFAULTS.hash_block_size,
    kv_cache_memory_bytes: Annotated[
        int, option(NodeConfig, "kv_cache_memory_bytes")
    ] = DEFAULTS.kv_cache_memory_bytes,
    dtype: Annotated[str, option(NodeConfig, "dtype")] = DEFAULTS.dtype,
    tier_bytes: TierBytes = 64 << 30,
) -> None:
    """Prints what fits an arena, a token's bytes, a state's and a hand-over's, and tiers."""
    try:
        config = read_config(resolve_folder(model), dtype)
        arena = plan_arena(
            config.groups, block_size, kv_cache_memory_bytes, hash_block_size=hash_block_size
        )
        typer.echo(plan_report(arena, config.max_position_embeddings))
        typer.echo(content_report(arena, config.max_position_embeddings))
        typer.echo(tier_report(arena, tier_bytes, config.max_position_embeddings))
    except TandemError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(plan)
