"""Building the parts of a trainer from what the user gave, and refusing what cannot work."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from peft import PeftConfig, PeftModel
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_kit.callbacks import LOG_FILE
from rlhf_kit.checkpoint import list_checkpoints
from rlhf_kit.config import PPOConfig
from rlhf_kit.data import PromptDataset
from rlhf_kit.loading import max_positions
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.packaged import resolve_model
from rlhf_kit.processes import shard_base, sharding_is_wanted
from rlhf_kit.reward_models import load_reward_model
from rlhf_kit.rewards import RewardFunctions
from rlhf_kit.roles import adapter_parameters
from rlhf_kit.saving import VALUE_HEAD_FILE
from rlhf_kit.scoring import checkpointable_layers

_USE_K1 = " Use kl_estimator='k1' in the reward, or kl_placement='loss' with 'full' or 'k2'."
KL_WARNINGS = {
    (
        "reward",
        "full",
    ): "kl_estimator='full' in the reward is the same whichever token is drawn, so it holds the tokens "
    "before it to the reference but not the token itself: one-token completions would not feel it at all." + _USE_K1,
    ("reward", "k2"): "kl_estimator='k2' in the reward does not have the gradient of the KL." + _USE_K1,
    ("reward", "k3"): "kl_estimator='k3' in the reward has the gradient of KL(policy || reference) minus that of "
    "KL(reference || policy), which nearly cancel close to the reference." + _USE_K1,
    ("loss", "k3"): "kl_estimator='k3' in the loss follows the gradient of KL(reference || policy), not of "
    "KL(policy || reference): use 'full' (exact) or 'k2'.",
}


def warn_about_settings(args: PPOConfig) -> None:
    """Warn of settings that are legal and bias the gradient: what is wrong, and what to set instead."""
    truncating = {"top_k": args.top_k > 0, "top_p": args.top_p < 1}
    for name in (name for name, on in truncating.items() if on):
        warnings.warn(
            f"{name}={getattr(args, name)} samples from a truncated distribution, while PPO's log-probabilities are "
            f"those of the full one: the gradient is biased. Leave {name} at {getattr(PPOConfig, name)}.",
            stacklevel=3,
        )
    if args.kl_coef > 0 and (args.kl_placement, args.kl_estimator) in KL_WARNINGS:
        warnings.warn(KL_WARNINGS[args.kl_placement, args.kl_estimator], stacklevel=3)


def refuse_used_folder(folder: Path, *, but_not_to_resume: bool = False) -> None:
    """Raise `ValueError` if the folder holds a run or a model, which this run would mix with or overwrite.

    Args:
        folder: the output_dir.
        but_not_to_resume: let pass what `train(resume_from_checkpoint=True)` could go on with.
    """
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"output_dir {str(folder)!r} cannot be made: {str(place)!r} is a file.")
    files = (LOG_FILE, VALUE_HEAD_FILE, "adapter_config.json", "model.safetensors")
    found = [name for name in files if (folder / name).exists()] + sorted(p.name for p in folder.glob("checkpoint-*"))
    checkpoints = list_checkpoints(folder)
    if checkpoints and but_not_to_resume:
        return
    if found:
        ways = "train(resume_from_checkpoint=True), or trainer.load_checkpoint() before a loop of your own"
        resume = f", go on with it by {ways}" if checkpoints else ""
        raise ValueError(
            f"output_dir {str(folder)!r} already holds {found}: choose another output_dir{resume}, or move it away. "
            "Nothing was changed."
        )


def build_model(
    model: Any, args: PPOConfig, peft_config: PeftConfig | None, accelerator: Accelerator
) -> AutoModelForCausalLMWithValueHead:
    """The model with value head, on its device, equal in all processes, and with something to train.

    Raises:
        ValueError: settings that do not fit a loaded model, or a policy that cannot be trained.
    """
    loading: dict[str, Any] = {"load_in_8bit": args.load_in_8bit, "load_in_4bit": args.load_in_4bit}
    if args.dtype != "auto":
        loading["dtype"] = args.dtype
    if isinstance(model, AutoModelForCausalLMWithValueHead):
        given = [name for name, value in {**loading, "peft_config": peft_config}.items() if value]
        if given:
            raise ValueError(f"{given} cannot be applied to a model with value head: set them when making it.")
        if model.v_head.kind != args.value_head:
            raise ValueError(
                f"the model has a {model.v_head.kind!r} value head, but args.value_head={args.value_head!r}: set "
                f"PPOConfig(value_head={model.v_head.kind!r})."
            )
        if model.critic != args.critic:
            raise ValueError(
                f"the model has a {model.critic!r} critic, but args.critic={args.critic!r}: set "
                f"PPOConfig(critic={model.critic!r})."
            )
    else:
        if isinstance(model, str | Path) and any((args.load_in_8bit, args.load_in_4bit)):
            loading["device_map"] = {"": accelerator.device}
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            model, peft_config=peft_config, value_head=args.value_head, critic=args.critic, **loading
        )
    _refuse_untrainable(model)
    _refuse_unsavable(model)
    if args.gradient_checkpointing:
        checkpointable_layers(model.causal_lm)
    if sharding_is_wanted():
        shard_base(model, accelerator)
    if not getattr(model.causal_lm, "is_quantized", False):  # a quantised model is on its device already
        model.to(accelerator.device)
    if accelerator.num_processes > 1:
        for _, parameter in model.trainable_parameters():
            broadcast(parameter.data)
    return model


def _refuse_untrainable(model: AutoModelForCausalLMWithValueHead) -> None:
    policy = [(name, p) for name, p in model.pretrained_model.named_parameters() if p.requires_grad]
    if not policy:
        raise ValueError(
            "the policy has nothing to train: all its parameters are frozen. Pass peft_config=LoraConfig(...), or "
            "load the adapter with PeftModel.from_pretrained(..., is_trainable=True)."
        )
    if model.is_peft_model:
        network = model.pretrained_model
        adapted = {id(p) for name in network.peft_config for p in adapter_parameters(network, name)}
        loose = [name for name, p in policy if id(p) not in adapted]
        if loose:
            raise ValueError(
                f"{len(loose)} trainable parameters belong to no adapter, e.g. {loose[0]}: the reference would move "
                "with them, and saving the adapter would lose them. Freeze them, or name their layers in "
                "LoraConfig(modules_to_save=...)."
            )
    half = [name for name, p in policy if p.dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise ValueError(
            f"{len(half)} trainable parameters are {str(dict(policy)[half[0]].dtype).removeprefix('torch.')}, e.g. "
            f"{half[0]}: most updates are smaller than its resolution and would be lost. Load with dtype='float32' "
            "(and launch with --mixed_precision bf16 for speed), or train LoRA adapters in float32, as PEFT makes "
            "them unless autocast_adapter_dtype=False."
        )
    if not model.is_peft_model and getattr(model.causal_lm, "is_quantized", False):
        raise ValueError("a quantised base cannot be trained itself: pass peft_config=LoraConfig(...).")


def _refuse_unsavable(model: AutoModelForCausalLMWithValueHead) -> None:
    """A whole model is saved with its generation config, which transformers does not write if it is contradictory."""
    if not model.is_peft_model:
        try:
            model.generation_config.validate(strict=True)
        except ValueError as error:
            raise ValueError(
                f"the model could not be saved, for its generation_config contradicts itself: {error} Rollouts do not "
                "use it: set model.generation_config = GenerationConfig()."
            ) from error


def load_tokenizer(source: Any, model: AutoModelForCausalLMWithValueHead) -> PreTrainedTokenizerBase:
    """The tokenizer from where the model came from: the folder of an adapter, or else that of its base.

    Raises:
        ValueError: it is not there.
    """
    own = [resolve_model(str(source))] if isinstance(source, str | Path) else []
    names = list(dict.fromkeys([*own, model.config.name_or_path]))
    for name in names:
        try:
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # None would ask on the terminal
        except (OSError, ValueError) as error:
            reason = error
    raise ValueError(
        f"no tokenizer was found at {' or '.join(map(repr, names))}: pass processing_class=<your tokenizer>."
    ) from reason


def check_stop_ids(ids: list[int], vocab_size: int) -> None:
    """Raise `ValueError` for an end token that the model can never sample."""
    unknown = [i for i in ids if i >= vocab_size]
    if unknown:
        raise ValueError(
            f"end tokens {unknown} (stop_token_ids, or EOS) lie outside the model's vocabulary of {vocab_size} tokens."
        )


def make_prompts(
    dataset: Any, args: PPOConfig, tokenizer: PreTrainedTokenizerBase, model: AutoModelForCausalLMWithValueHead
) -> PromptDataset | None:
    """A dataset's prompts, tokenised and checked; None without a dataset."""
    if dataset is None:
        return None
    return PromptDataset(
        dataset,
        tokenizer,
        max_prompt_length=args.max_prompt_length,
        truncate_prompts=args.truncate_prompts,
        text_prompt_length=args.text_prompt_length,
        max_completion_length=args.max_completion_length,
        context_length=max_positions(model.causal_lm),
        vocab_size=model.vocab_size,
    )


def make_rewards(
    sources: Any,
    args: PPOConfig,
    model: AutoModelForCausalLMWithValueHead,
    accelerator: Accelerator,
    *,
    stop_token_ids: list[int],
    prompts: Sequence[PromptDataset | None],
) -> RewardFunctions | None:
    """The reward functions, models among them loaded, checked against the columns of the prompts.

    Returns:
        None without any.
    """
    if sources is None:
        if args.reward_weights is not None:
            raise ValueError(f"reward_weights={args.reward_weights} needs reward_funcs.")
        return None
    funcs = [
        load_reward_model(
            source,
            model,
            stop_token_ids=stop_token_ids,
            batch_size=args.micro_batch_size,
            device=accelerator.device,
            autocast=accelerator.autocast,
        )
        if isinstance(source, str | Path | PreTrainedModel | PeftModel)
        else source
        for source in (sources if isinstance(sources, list | tuple) else [sources])
    ]
    rewards = RewardFunctions(funcs, weights=args.reward_weights)
    for dataset in prompts:
        if dataset is not None:
            rewards.check_arguments(dataset.column_names)
    return rewards
