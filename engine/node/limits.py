"""What a node can promise: options that exist, and a context that model and arena hold."""

from engine.config import NodeConfig
from engine.errors import ConfigError
from engine.kv_cache.plan import ArenaPlan


def refuse_unavailable(config: NodeConfig) -> None:
    """Raises ConfigError for options whose parts are not built yet, instead of ignoring them."""
    if config.kv_events_config.enable_kv_cache_events:
        raise ConfigError("KV events are not available yet")


def context_length(asked: int | None, model_limit: int, plan: ArenaPlan) -> int:
    """`asked` or the model's limit, in tokens; one request of that length must fit the arena alone.

    Raises ConfigError when `asked` is more than model or arena can hold.
    """
    if asked is not None and asked > model_limit:
        raise ConfigError(f"--max-model-len {asked} is more than the model's {model_limit}")
    wanted = asked or model_limit
    if plan.units_for(wanted) <= plan.num_units:
        return wanted
    if asked is None:
        return _longest(plan, wanted)
    needed = plan.units_for(wanted) * plan.unit_bytes
    raise ConfigError(
        f"--max-model-len {asked} needs an arena of {needed} bytes, --kv-cache-memory-bytes gives "
        f"{plan.arena_bytes}; raise it or ask for less"
    )


def _longest(plan: ArenaPlan, upper: int) -> int:
    """The longest context that fits, by bisection."""
    fits, too_long = 1, upper
    if plan.units_for(fits) > plan.num_units:
        raise ConfigError(f"an arena of {plan.arena_bytes} bytes holds not even one token")
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if plan.units_for(middle) <= plan.num_units:
            fits = middle
        else:
            too_long = middle
    return fits
