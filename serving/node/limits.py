"""Limits of this machine, of a model and of an arena, checked before a node serves."""

import socket

import torch

from engine.arena import available_host_bytes
from engine.errors import ConfigError
from engine.kv_cache.arena_plan import ArenaPlan
from engine.sched.scheduler import SchedulerConfig
from serving.config import NodeConfig


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
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return
    num_found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (wanted.index or 0) >= num_found:
        raise ConfigError(
            f"--device {device}: torch {torch.__version__} finds {num_found} CUDA devices here"
        )


def check_memory(plan: ArenaPlan, device: str) -> None:
    """Raises ConfigError for an arena that is larger than the free memory of its device."""
    on_host = torch.device(device).type == "cpu"
    available = available_host_bytes() if on_host else torch.cuda.mem_get_info(device)[0]
    if plan.arena_bytes > available:
        raise ConfigError(
            f"--kv-cache-memory-bytes: an arena of {plan.arena_bytes:,} bytes is asked for, and "
            f"{available:,} bytes of memory are available"
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
