"""Building the parts of a trainer from what the user gave, and refusing what cannot work."""

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration, broadcast
from peft import PeftConfig
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_kit.callbacks import LOG_FILE
from rlhf_kit.config import PPOConfig
from rlhf_kit.modeling import VALUE_HEAD_FILE, AutoModelForCausalLMWithValueHead
from rlhf_kit.packaged import resolve_model
from rlhf_kit.scoring import checkpointable_layers

SUPPORTED_PROCESSES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


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


def refuse_used_folder(folder: Path) -> None:
    """Raise `ValueError` if the folder holds a run or a model, which this run would mix with or overwrite."""
    files = (LOG_FILE, VALUE_HEAD_FILE, "adapter_config.json", "model.safetensors")
    found = [name for name in files if (folder / name).exists()]
    if found:
        raise ValueError(
            f"output_dir {str(folder)!r} already holds {found}: choose another output_dir, or move that folder away. "
            "Nothing was changed."
        )


def make_accelerator(args: PPOConfig) -> Accelerator:
    """The `Accelerator` of the launch, if it is one that this trainer supports.

    Raises:
        ValueError: fp16, sharding, gradient accumulation, or more processes than prompts.
    """
    project = None
    if args.report_to:
        folder = Path(args.output_dir, args.run_name or "")
        project = ProjectConfiguration(project_dir=args.output_dir, logging_dir=str(folder))
    accelerator = Accelerator(log_with=args.report_to, project_config=project)
    available = {str(tracker) for tracker in accelerator.log_with}
    missing = [name for name in args.report_to or [] if name != "all" and name not in available]
    if missing:
        raise ValueError(
            f"report_to names {missing}, but these trackers are not installed: pip install them, or drop them."
        )
    if accelerator.distributed_type not in SUPPORTED_PROCESSES:
        raise ValueError(
            f"distributed type {accelerator.distributed_type.value} is not supported: launch one process per device "
            "without FSDP, DeepSpeed or Megatron."
        )
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
    if args.num_prompts_per_iteration() < accelerator.num_processes:
        raise ValueError(
            f"{args.num_prompts_per_iteration()} prompts per iteration are too few for {accelerator.num_processes} "
            "processes: raise rollout_batch_size."
        )
    return accelerator


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
    else:
        if isinstance(model, str | Path) and any((args.load_in_8bit, args.load_in_4bit)):
            loading["device_map"] = {"": accelerator.device}
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            model, peft_config=peft_config, value_head=args.value_head, **loading
        )
    _refuse_untrainable(model)
    if args.gradient_checkpointing:
        checkpointable_layers(model.causal_lm)
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
    half = [name for name, p in policy if p.dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise ValueError(
            f"{len(half)} trainable parameters are {str(dict(policy)[half[0]].dtype).removeprefix('torch.')}, e.g. "
            f"{half[0]}: most updates are smaller than its resolution and would be lost. Load with dtype='float32' "
            "(and launch with --mixed_precision bf16 for speed), or train LoRA adapters, which are float32."
        )
    if not model.is_peft_model and getattr(model.causal_lm, "is_quantized", False):
        raise ValueError("a quantised base cannot be trained itself: pass peft_config=LoraConfig(...).")


def load_tokenizer(source: Any, model: AutoModelForCausalLMWithValueHead) -> PreTrainedTokenizerBase:
    """The tokenizer from where the model came from.

    Raises:
        ValueError: it is not there.
    """
    name = resolve_model(str(source)) if isinstance(source, str | Path) else model.config.name_or_path
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer was found at {name!r}: pass processing_class=<your tokenizer>.") from error


def id_lists(name: str, tensors: Any, vocab_size: int) -> list[list[int]]:
    """Token ids given as tensors or lists, as lists.

    Raises:
        ValueError: one that is not one-dimensional and of integers, is empty, or holds an id outside the vocabulary.
    """
    rows = []
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, str):
            raise ValueError(f"{name}[{i}] is text: pass token ids, e.g. torch.tensor(tokenizer(text).input_ids).")
        tensor = torch.as_tensor(tensor)
        if tensor.ndim != 1 or tensor.is_floating_point() or len(tensor) == 0:
            raise ValueError(
                f"{name}[{i}] must be a tensor of token ids of shape (n,) with n >= 1 (a completion holds at least "
                f"its end token), got shape {tuple(tensor.shape)}, {tensor.dtype}."
            )
        rows.append(tensor.tolist())
        if not (min(rows[-1]) >= 0 and max(rows[-1]) < vocab_size):
            raise ValueError(
                f"{name}[{i}] holds ids from {min(rows[-1])} to {max(rows[-1])}; the model's vocabulary has "
                f"{vocab_size} tokens."
            )
    return rows


def check_stop_ids(ids: list[int], vocab_size: int) -> None:
    """Raise `ValueError` for an end token that the model can never sample."""
    unknown = [i for i in ids if i >= vocab_size]
    if unknown:
        raise ValueError(
            f"end tokens {unknown} (stop_token_ids, or EOS) lie outside the model's vocabulary of {vocab_size} tokens."
        )


def check_context(what: str, length: int, context_length: int | None) -> None:
    """Raise `ValueError` for a sequence that is longer than the model was built for."""
    if context_length is not None and length > context_length:
        raise ValueError(f"{what}: {length} tokens are more than the model's context of {context_length}.")


def checked_step(
    queries: Any,
    responses: Any,
    scores: Any,
    *,
    share: int,
    rollout_batch_size: int,
    vocab_size: int,
    context_length: int | None,
    stop_token_ids: list[int],
) -> tuple[list[list[int]], list[list[int]], Tensor]:
    """The arguments of `PPOTrainer.step` as ids and (share,) float32 scores.

    Raises:
        ValueError: a wrong number of them, ids that cannot be, or a score that is not finite.
    """
    prompt_ids = id_lists("queries", queries, vocab_size)
    completion_ids = id_lists("responses", responses, vocab_size)
    if not len(prompt_ids) == len(completion_ids) == share:
        raise ValueError(
            f"step() got {len(prompt_ids)} queries and {len(completion_ids)} responses; this process's share of "
            f"rollout_batch_size={rollout_batch_size} is {share}."
        )
    for i, (query, response) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
        check_context(f"queries[{i}] with responses[{i}]", len(query) + len(response), context_length)
        ends = [t for t, token in enumerate(response[:-1]) if token in stop_token_ids]
        if ends:
            raise ValueError(
                f"responses[{i}] has {len(response)} tokens, but its first end token is number {ends[0] + 1}: cut it "
                "there. What follows an end token, padding too, was not chosen by the policy."
            )
    if isinstance(scores, int | float):
        raise ValueError(f"scores must hold one number per response, {share} here, got {scores}.")
    numbers = torch.tensor([float(score) for score in scores], dtype=torch.float32)
    if len(numbers) != share:
        raise ValueError(f"{len(numbers)} scores were given for {share} responses.")
    bad = (~numbers.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"scores[{bad[0]}] is {float(numbers[bad[0]])}: scores must be finite numbers.")
    return prompt_ids, completion_ids, numbers
