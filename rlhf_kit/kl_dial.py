"""The KL dial: from the reference to the policy by turning one number, without training anything again.

Where policy and reference share a base, the way between them is a line: reference + scale * (policy - reference), in
the weights that the adapters add. Scale 0 is the reference, 1 the policy. Every scale has its score and its KL, so a
run that drifted too far can be taken back to where the text was still good.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraLayer

from rlhf_kit.metrics import rollout_metrics
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.roles import REFERENCE, flags_kept, has_adapter

DIAL = "dial"  # name of the adapter that stands between
SCALES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class DialPoint:
    """Held-out prompts answered at one scale."""

    scale: float
    score: float  # mean
    score_error: float  # standard error of the mean
    ref_kl: float  # nats per token
    ref_kl_per_completion: float  # nats
    completions: list[Any]  # one per prompt, the same prompts and random numbers at every scale


def with_reference(policy: str, reference: str | None = None, **kwargs: Any) -> AutoModelForCausalLMWithValueHead:
    """A trained adapter together with what it was held to, so that the dial has two ends.

    Args:
        policy: folder of the trained adapter.
        reference: folder of the adapter that training started from; None = the bare base.
        kwargs: passed to `AutoModelForCausalLMWithValueHead.from_pretrained`.

    Returns:
        The model; a `PPOTrainer` takes it as it is.
    """
    model = AutoModelForCausalLMWithValueHead.from_pretrained(policy, **kwargs)
    network = model.pretrained_model
    with flags_kept(network):
        if reference is None:  # a fresh adapter changes nothing
            network.add_adapter(REFERENCE, LoraConfig(r=1, target_modules=network.active_peft_config.target_modules))
        else:
            network.load_adapter(reference, REFERENCE)
        network.set_adapter(network.active_adapter)
    return model


@contextmanager
def dialed(model: AutoModelForCausalLMWithValueHead, scale: float) -> Iterator[None]:
    """Inside the `with` block the policy is reference + scale * (policy - reference). Saving and merging see it too.

    Args:
        model: with LoRA adapters.
        scale: 0 = the reference, 1 = the policy.

    Raises:
        ValueError: a scale outside [0, 1], no adapters, or adapters that are not a sum on top of the base.
    """
    _check_scale(scale)
    _refuse_nonlinear(model)
    network = model.pretrained_model
    policy = network.active_adapter
    parts = {policy: scale}
    if has_adapter(network, REFERENCE):
        parts[REFERENCE] = 1 - scale
    with flags_kept(network), _plain_start(network.peft_config[policy]):
        network.base_model.add_weighted_adapter(list(parts), list(parts.values()), DIAL, combination_type="cat")
        for module in network.modules():
            if isinstance(module, LoraLayer) and DIAL in module.scaling:
                module.scaling[DIAL] = 1.0  # PEFT multiplies scalings into the weights, but not that of rsLoRA
        network.set_adapter(DIAL, inference_mode=True)
    try:
        yield
    finally:
        with flags_kept(network):
            network.set_adapter(policy)
            network.delete_adapter(DIAL)


def sweep_dial(trainer: Any, scales: Sequence[float] = SCALES, eval_dataset: Any = None) -> list[DialPoint]:
    """Answer held-out prompts at several scales. The run's log stays as it is.

    Args:
        trainer: a `PPOTrainer` with reward_funcs.
        scales: in [0, 1].
        eval_dataset: prompts; None = those of the trainer.

    Returns:
        One point per scale.

    Raises:
        ValueError: no scale, or one that `dialed` refuses, before any is tried.
    """
    if not scales:
        raise ValueError(f"scales is empty: name some between 0 and 1, such as {list(SCALES)}.")
    for scale in scales:
        _check_scale(scale)
    points = []
    for scale in scales:
        with dialed(trainer.model, scale):
            rollout = trainer.evaluation_rollout(eval_dataset)
        metrics = rollout_metrics(rollout)
        points.append(
            DialPoint(
                scale=float(scale),
                score=metrics["score"],
                score_error=float(rollout.scores.std() / len(rollout) ** 0.5) if len(rollout) > 1 else 0.0,
                ref_kl=metrics["ref_kl"],
                ref_kl_per_completion=metrics["ref_kl_per_completion"],
                completions=rollout.completions,
            )
        )
    return points


def dial_table(points: Sequence[DialPoint]) -> str:
    """The points as a Markdown table."""
    rows = [
        f"| {p.scale:.2f} | {p.score:.3f} +- {p.score_error:.3f} | {p.ref_kl:.4f} | {p.ref_kl_per_completion:.3f} |"
        for p in points
    ]
    head = "| scale | score | KL, nats per token | KL, nats per completion |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def plot_dial(points: Sequence[DialPoint], path: str | Path) -> None:
    """Draw score against KL, the frontier that the dial walks along, as a PNG file. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(
        [p.ref_kl for p in points], [p.score for p in points], [p.score_error for p in points], marker="o", capsize=3
    )
    for p in points:
        axes.annotate(f"{p.scale:g}", (p.ref_kl, p.score), textcoords="offset points", xytext=(6, -10))
    axes.set_xlabel("KL to the reference, nats per token")
    axes.set_ylabel("score")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


@contextmanager
def _plain_start(config: LoraConfig) -> Iterator[None]:
    """Inside the `with` block an adapter with these settings starts without changing the base; PiSSA's would."""
    chosen, config.init_lora_weights = config.init_lora_weights, True
    try:
        yield
    finally:
        config.init_lora_weights = chosen


def _check_scale(scale: float) -> None:
    if not 0 <= scale <= 1:
        raise ValueError(f"scale must be between 0 (the reference) and 1 (the policy), got {scale}.")


def _refuse_nonlinear(model: AutoModelForCausalLMWithValueHead) -> None:
    if not model.is_peft_model:
        raise ValueError("the dial needs adapters, but the whole model was trained: nothing lies between two models.")
    for name in (model.pretrained_model.active_adapter, REFERENCE):
        config = model.pretrained_model.peft_config.get(name)
        if config is None:
            continue
        if not isinstance(config, LoraConfig):
            raise ValueError(f"the dial needs LoRA adapters, but {name!r} is {config.peft_type.value}.")
        wrong = [key for key in ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias",
                                 "target_parameters") if getattr(config, key, None)]  # fmt: skip
        if wrong:
            raise ValueError(f"the dial needs plain LoRA, but adapter {name!r} has {', '.join(wrong)}.")
