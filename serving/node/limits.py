"""Limits of this machine, of a model and of an arena, checked before a node serves."""

import socket

from engine.arena import available_host_bytes, device_memory
from engine.errors import ConfigError
from engine.kv_cache.arena_plan import ArenaPlan
from engine.sched.scheduler import SchedulerConfig
from serving.config import NodeConfig
from serving.memory_plan import MemoryPlan


def scheduler_config(config: NodeConfig) -> SchedulerConfig:
    """The options of a node that its scheduler reads."""
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        scheduling_policy=config.scheduling_policy,
        mamba_decode_checkpoint_interval=config.mamba_decode_checkpoint_interval,
        recompute_failed_loads=config.kv_transfer_config.kv_load_failure_policy == "recompute",
    )


def check_ports(config: NodeConfig) -> None:
    """Raises ConfigError for a port that is taken, before the model is loaded: that takes long."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    for flag, port in (("--port", config.port), ("--grpc-port", config.grpc_port)):
        try:
            socket.create_server((config.host, port), family=family).close()
        except OSError as error:
            raise ConfigError(
                f"{flag}: cannot listen on {config.host}:{port}: {error.strerror}"
            ) from error


def check_device(device: str) -> None:
    """Raises ConfigError for a `--device` that this machine, or this build of torch, lacks."""
    if device != "cpu":
        device_memory(device)


def check_memory(plan: ArenaPlan) -> None:
    """Raises ConfigError for an arena that is larger than the free memory of the host."""
    available = available_host_bytes()
    if plan.arena_bytes > available:
        raise ConfigError(
            f"--kv-cache-memory-bytes: an arena of {plan.arena_bytes:,} bytes is asked for, and "
            f"{available:,} bytes of memory are available"
        )


def check_device_memory(memory: MemoryPlan, device: str) -> None:
    """Raises ConfigError for an arena that has no room on a device beside what else is there."""
    available, total = device_memory(device)
    if memory.total <= available:
        return
    fix = f"at most {available - memory.beside_arena} fit"
    if available <= memory.beside_arena:
        fix = (
            "no arena fits: free memory of the device, or lower --max-num-batched-tokens, "
            "--max-num-seqs or --max-model-len"
        )
    raise ConfigError(
        f"--kv-cache-memory-bytes: an arena of {memory.arena:,} bytes does not fit {device} beside "
        f"weights of {memory.weights:,} and {memory.beside_arena - memory.weights:,} for graphs, "
        f"temporaries and CUDA: {available:,} of {total:,} bytes are free; {fix}"
    )


def check_decode_checkpoints(config: NodeConfig, plan: ArenaPlan) -> None:
    """Raises ConfigError for an interval at which no later request could start.

    A hit at a checkpoint also needs every attention block up to there, and while a request decodes
    only its full blocks are findable.
    """
    interval = config.mamba_decode_checkpoint_interval
    if not interval:
        return
    flag = f"--mamba-decode-checkpoint-interval {interval}"
    if not config.enable_prefix_caching:
        raise ConfigError(f"{flag} needs prefix caching; drop one of the two options")
    step = plan.joint_block_size
    if interval % step:
        lower = interval - interval % step
        nearest = f"{lower} or {lower + step}" if lower else f"{step}"
        raise ConfigError(
            f"{flag} must be a multiple of an attention block, {step} tokens: {nearest}"
        )


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
        if longest := plan.longest_sequence(wanted):
            return longest
        raise ConfigError(f"an arena of {plan.arena_bytes} bytes holds not even one token")
    needed = plan.units_for(wanted) * plan.unit_bytes
    raise ConfigError(
        f"--max-model-len {asked} needs an arena of {needed} bytes, --kv-cache-memory-bytes gives "
        f"{plan.arena_bytes}; raise it or ask for less"
    )
