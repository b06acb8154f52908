"""What a run is, so that a checkpoint of another one is not taken for its own."""

import json
import warnings
from dataclasses import asdict
from typing import Any

import accelerate
import peft
import torch
import transformers
from accelerate import Accelerator

from rlhf_kit.config import PPOConfig
from rlhf_kit.data import PromptDataset
from rlhf_kit.fingerprint import digest, weights_digest
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.rewards import RewardFunctions

# Settings that do not touch a number of the training, and those that touch only rounding and random draws.
FREE = {"output_dir", "log_every", "eval_every", "save_every", "save_total_limit", "report_to", "run_name",
        "log_completions"}  # fmt: skip
ROUNDING = {"micro_batch_size", "generation_batch_size", "gradient_checkpointing"}
FALLING = ("linear", "cosine")  # schedules that depend on num_iterations
NOT_COMPARED = {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping",
                "_name_or_path", "name_or_path", "transformers_version", "architectures"}  # fmt: skip


def run_identity(
    args: PPOConfig,
    model: AutoModelForCausalLMWithValueHead,
    prompts: PromptDataset | None,
    rewards: RewardFunctions | None,
    accelerator: Accelerator,
    *,
    stop_token_ids: list[int],
) -> dict[str, Any]:
    """All that must be the same for a resumed run to give the same numbers, as JSON values.

    Args:
        args: the config.
        model: its adapters' settings, and a fingerprint of its frozen weights.
        prompts: of the training, None in a loop of the user's own.
        rewards: their names, and fingerprints of models. The code of functions cannot be compared.
        accelerator: number of processes.
        stop_token_ids: that end a completion; some come from the model's generation config.
    """
    adapters = model.pretrained_model.peft_config if model.is_peft_model else {}
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft, accelerate)}
    return {
        "config": _plain(asdict(args)),
        "adapters": {name: _plain(config.to_dict()) for name, config in adapters.items()},
        "model config": _plain(model.config.to_dict()),
        "end tokens": stop_token_ids,
        "frozen weights": _weights_fingerprint(model),
        "training prompts": prompts and digest(json.dumps(prompts.prompt_ids)),
        "other columns": prompts and prompts.columns_digest(),
        "reward functions": rewards.names if rewards else [],
        "reward models": rewards.fingerprints() if rewards else {},
        "number of processes": accelerator.num_processes,
        "versions": versions | {"device": model.device.type},
    }


def compare_runs(saved: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Differences between the identity in a checkpoint and that of this run.

    Returns:
        (those that change what is learned, those that change rounding, random draws or the learning-rate plan only),
        one line each. Settings of logging and saving may differ.
    """
    config, own_config = saved["config"], now["config"]
    changed = {name for name in {*config, *own_config} if config.get(name) != own_config.get(name)} - FREE
    lines = {name: f"{name}: {config.get(name)!r} in the checkpoint, {own_config.get(name)!r} now" for name in changed}
    soft = [lines.pop(name) for name in sorted(changed & ROUNDING)]
    longer = lines.pop("num_iterations", None)
    if longer and own_config["lr_scheduler_type"] in FALLING:
        soft.append(f"{longer}, and the learning rate falls to 0 at that iteration")
    hard = [lines[name] for name in sorted(lines)] + _adapter_differences(saved["adapters"], now["adapters"])
    hard += [
        f"model config, {key}: {saved['model config'][key]!r} in the checkpoint, {now['model config'][key]!r} now"
        for key in sorted({*saved["model config"]} & {*now["model config"]} - NOT_COMPARED)
        if saved["model config"][key] != now["model config"][key]
    ]
    if saved["end tokens"] != now["end tokens"]:
        hard.append(f"end tokens: {saved['end tokens']} in the checkpoint, {now['end tokens']} now")
    for part in ("frozen weights", "training prompts", "other columns", "reward models"):
        if saved[part] != now[part]:
            hard.append(f"{part}: not those of the checkpoint")
    for part, differences in (("reward functions", hard), ("number of processes", soft), ("versions", soft)):
        if saved[part] != now[part]:
            differences.append(f"{part}: {saved[part]} in the checkpoint, {now[part]} now")
    return hard, soft


def refuse_another_run(hard: list[str], soft: list[str]) -> None:
    """Raise `ValueError` with all differences that matter; warn once of those that are smaller."""
    if hard:
        raise ValueError(
            "the checkpoint belongs to a run with other settings:\n  "
            + "\n  ".join(hard)
            + "\nSet them back to go on with that run. For a new one from its weights, pass its folder as model. "
            "Nothing was changed."
        )
    if soft:
        message = "resumed with differences, so the numbers will not be those of a run without interruption:\n  "
        warnings.warn(message + "\n  ".join(soft), stacklevel=6)


def _adapter_differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    lines = []
    for name in sorted({*saved, *now}):
        old, new = saved.get(name, {}), now.get(name, {})
        keys = sorted(key for key in {*old, *new} - NOT_COMPARED if old.get(key) != new.get(key))
        lines += [f"adapter {name!r}, {key}: {old.get(key)!r} in the checkpoint, {new.get(key)!r} now" for key in keys]
    return lines


def _weights_fingerprint(model: AutoModelForCausalLMWithValueHead) -> str:
    """Digest of name, shape, dtype and some elements of every frozen weight, of the reference's too."""
    named = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    if model.ref_model is not None:
        named += [(f"reference {name}", p) for name, p in model.ref_model.named_parameters()]
    return weights_digest(named)


def _plain(value: Any) -> Any:
    """As JSON would give it back; sets sorted, what JSON does not know as text."""

    def fallback(item: Any) -> Any:
        return sorted(item) if isinstance(item, set | frozenset) else str(item)

    return json.loads(json.dumps(value, default=fallback, sort_keys=True))
