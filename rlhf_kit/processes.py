"""One process or many: what launches are supported, sharding of the frozen base, and failing together.

Every process holds the adapters, the value head and the optimizer in full; gradients are summed by hand (see
`rlhf_kit.update`). What can be sharded is the frozen base (FSDP2), which is nearly all of the memory: its parameters
get no gradient, so sharding them changes no number.
"""

import math
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration, gather_object
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlhf_kit.config import PPOConfig
from rlhf_kit.scoring import checkpointable_layers

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)


def make_accelerator(args: PPOConfig) -> Accelerator:
    """The `Accelerator` of the launch, if it is one that this trainer supports.

    Raises:
        ValueError: fp16, DeepSpeed or the like, FSDP1, gradient accumulation, or more processes than prompts.

    Warns:
        Once, if the launcher was asked for several processes and started one.
    """
    project = None
    if args.report_to:
        folder = Path(args.output_dir, args.run_name or "")
        project = ProjectConfiguration(project_dir=args.output_dir, logging_dir=str(folder))
    _refuse_deepspeed()
    accelerator = Accelerator(log_with=args.report_to, project_config=project)
    available = {str(tracker) for tracker in accelerator.log_with}
    missing = [name for name in args.report_to or [] if name != "all" and name not in available]
    if missing:
        raise ValueError(
            f"report_to names {missing}, but these trackers are not installed: pip install them, or drop them."
        )
    _check_launch(accelerator)
    if args.num_prompts_per_iteration() < accelerator.num_processes:
        raise ValueError(
            f"{args.num_prompts_per_iteration()} prompts per iteration are too few for {accelerator.num_processes} "
            "processes: raise rollout_batch_size."
        )
    return accelerator


def _refuse_deepspeed() -> None:
    if _is_set("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "DeepSpeed is not supported: ZeRO-1 and 2 shard optimizer states and gradients, which LoRA keeps small; "
            "for what ZeRO-3 does, sharding the base, use FSDP2: accelerate launch --use_fsdp --fsdp_version 2."
        )


def _check_launch(accelerator: Accelerator) -> None:
    if accelerator.distributed_type not in SUPPORTED:
        raise ValueError(
            f"distributed type {accelerator.distributed_type.value} is not supported: launch one process per device, "
            "without it, or with FSDP2."
        )
    if sharding_is_wanted() and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError("FSDP version 1 is not supported: launch with --fsdp_version 2.")
    if sharding_is_wanted() and accelerator.num_processes == 1:
        raise ValueError("FSDP was asked for, but there is one process: launch several, or without FSDP.")
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={accelerator.mixed_precision!r} is not supported: its range is too small for "
            "probability ratios. Launch with bf16 or no mixed precision."
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} of the launch has no meaning: "
            "set PPOConfig.mini_batch_size (per optimizer step) and micro_batch_size (per forward pass) instead."
        )
    # accelerate sets the address for several processes; with --cpu it then starts one and no WORLD_SIZE.
    if accelerator.num_processes == 1 and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        warnings.warn(
            "one process runs, but the launcher seems to have been asked for several (MASTER_ADDR is set, WORLD_SIZE "
            "is not; accelerate launch --cpu does that). On CPUs use ACCELERATE_USE_CPU=true torchrun "
            "--nproc_per_node N ...",
            stacklevel=4,
        )


def share_of(accelerator: Accelerator, count: int) -> list[int]:
    """Which of `count` items this process handles: a run of neighbours."""
    parts = np.array_split(np.arange(count), accelerator.num_processes)
    return [int(i) for i in parts[accelerator.process_index]]


# Sharding


def sharding_is_wanted() -> bool:
    """Whether the launch asks for FSDP. Accelerate itself ignores that on CPUs; we do not."""
    return _is_set("ACCELERATE_USE_FSDP")


def shard_base(model: Any, accelerator: Accelerator) -> None:
    """Split the frozen parameters of an `AutoModelForCausalLMWithValueHead` over all processes, layer by layer.

    What is trained stays whole in every process. From here on all processes must make the same number of passes.

    Raises:
        ValueError: a model without adapters, or a quantised one.
    """
    if not model.is_peft_model:
        raise ValueError("FSDP shards the frozen base, but here the whole model is trained: pass peft_config.")
    if getattr(model.causal_lm, "is_quantized", False):
        raise ValueError("FSDP cannot shard a base quantised by bitsandbytes: drop load_in_8bit and load_in_4bit.")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    trained = {p for p in model.parameters() if p.requires_grad}
    # Resharded after every forward, the root too: one process alone may then read parameters, e.g. to save.
    for module in [*checkpointable_layers(model.causal_lm), model.causal_lm]:
        fully_shard(module, mesh=mesh, ignored_params=trained, reshard_after_forward=True)
    model.is_sharded = True


def passes(model: Any, count: int, size: int) -> Iterator[tuple[slice, bool]]:
    """Slices of at most `size` out of `count` rows, for one forward pass each.

    A pass over a sharded base is made by all processes at once, so a process with fewer rows makes idle ones.

    Yields:
        (slice, False) for own rows; (slice of the first row, True) for a pass whose result is to be dropped.
    """
    own = math.ceil(count / size)
    for i in range(_most(own) if model.is_sharded else own):
        yield (slice(i * size, (i + 1) * size), False) if i < own else (slice(0, 1), True)


def _most(count: int) -> int:
    """The largest count of any process."""
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return max(counts)


# Failing together


@contextmanager
def failing_together(accelerator: Accelerator) -> Iterator[None]:
    """An exception inside the block in one process is raised in all: nobody is left waiting for the one that failed.

    Raises:
        RuntimeError: in the other processes, with the traceback of the first that failed.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if accelerator.num_processes > 1:
        text = None if failure is None else "".join(traceback.format_exception(failure))
        texts: list[Any] = gather_object([text])
        failed = [rank for rank, found in enumerate(texts) if found is not None]
        if failed and failure is None:
            raise RuntimeError(f"process {failed[0]} failed:\n{texts[failed[0]]}")
    if failure is not None:
        raise failure


def any_of_all(accelerator: Accelerator, flag: bool) -> bool:
    """Whether the flag is set in any process."""
    if accelerator.num_processes == 1:
        return flag
    return any(gather_object([flag]))


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes", "on")
