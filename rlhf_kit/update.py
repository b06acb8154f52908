"""The learning phase: epochs of shuffled mini-batches on one rollout, one optimizer step each.

All processes hold the whole rollout. Each takes every n-th row of a mini-batch, losses are divided by the mini-batch's
global number of tokens, and gradients are summed: neither the micro-batch size nor the number of processes changes a
gradient.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import get_scheduler

from rlhf_kit.config import PPOConfig
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.objective import ppo_loss
from rlhf_kit.processes import passes
from rlhf_kit.roles import CRITIC, adapter_parameters
from rlhf_kit.rollout import Rollout
from rlhf_kit.sampling import seed_from
from rlhf_kit.state import PPOState
from rlhf_kit.targets import Targets

MAX_NONFINITE_ITERATIONS = 3


@dataclass
class _Log:
    """What the mini-batches of one iteration did."""

    sums: dict[str, float] = field(default_factory=dict)  # over the tokens of the applied steps
    tokens: int = 0
    ratio_error: float | None = None  # largest |ratio - 1| of the first mini-batch, when nothing has moved yet
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    stopping_kl: float | None = None  # approximate KL of the mini-batch that ended the update

    @property
    def stopped(self) -> bool:
        return self.stopping_kl is not None

    def add(self, sums: dict[str, float], tokens: int, grad_norm: float) -> None:
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in sums.items()}
        self.tokens += tokens
        self.grad_norms.append(grad_norm)

    def metrics(self) -> dict[str, float]:
        """Means over the tokens of the applied steps, and counts of steps."""
        steps = len(self.grad_norms)
        return {name: value / self.tokens for name, value in self.sums.items()} | {
            "grad_norm": sum(self.grad_norms) / steps if steps else 0.0,
            "initial_ratio_error": self.ratio_error or 0.0,
            "optimizer_steps": float(steps),
            "skipped_steps": float(self.skipped),
            "stopped_early": float(self.stopped),
            "stopping_approx_kl": self.stopping_kl or 0.0,
        }


class Updater:
    """Optimizer, learning-rate schedule and the loop over mini-batches.

    Args:
        model: its trainable parameters are updated; the critic has its own learning rate.
        args: sizes, optimizer and objective.
        accelerator: processes and autocast.

    Attributes:
        optimizer: AdamW with two groups, policy and critic.
        lr_scheduler: one step per planned optimizer step, steps that are left out included.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead, args: PPOConfig, accelerator: Accelerator):
        self._model, self._args, self._accelerator = model, args, accelerator
        own = adapter_parameters(model.pretrained_model, CRITIC) if model.critic == "adapter" else []
        critic = [*model.v_head.parameters(), *own]
        excluded = set(map(id, own))
        policy = [p for p in model.pretrained_model.parameters() if p.requires_grad and id(p) not in excluded]
        value_rate = args.learning_rate if args.value_learning_rate is None else args.value_learning_rate
        self.optimizer = torch.optim.AdamW(
            [{"params": policy, "lr": args.learning_rate}, {"params": critic, "lr": value_rate}],
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        steps = args.optimizer_steps_per_iteration()
        warmup = {"num_warmup_steps": args.warmup_iterations * steps} if args.lr_scheduler_type != "constant" else {}
        self.lr_scheduler = get_scheduler(
            args.lr_scheduler_type, self.optimizer, num_training_steps=args.num_iterations * steps, **warmup
        )

    def __call__(self, rollout: Rollout, targets: Targets, *, kl_coef: float, iteration: int) -> dict[str, float]:
        """Update on one rollout.

        Args:
            rollout: of all processes.
            targets: computed from it.
            kl_coef: coefficient in force.
            iteration: fixes, with the seed, how mini-batches are drawn.

        Returns:
            Losses and diagnostics as means over the tokens of all optimizer steps, and counts of steps.
        """
        shuffle = torch.Generator().manual_seed(seed_from(self._args.seed, iteration))
        log = _Log()
        rates: list[float] = []
        steps = self._args.optimizer_steps_per_iteration()
        step = iteration * steps  # planned steps so far: a run that stopped early or failed in between keeps its time
        for _ in range(self._args.ppo_epochs):
            for rows in torch.randperm(len(rollout), generator=shuffle).split(self._args.mini_batch_size):
                if not log.stopped:
                    rates = self._set_learning_rates(step)
                    self._step(rollout, targets, rows.to(rollout.scores.device), kl_coef, log)
                step += 1
        self.plan_from(iteration + 1)
        return log.metrics() | {"learning_rate": rates[0], "value_learning_rate": rates[1]}

    def plan_from(self, iteration: int) -> None:
        """Set the learning rates that an iteration starts with."""
        self._set_learning_rates(iteration * self._args.optimizer_steps_per_iteration())

    def _set_learning_rates(self, step: int) -> list[float]:
        """Put the schedule at a planned step, whatever came before."""
        schedule = self.lr_scheduler
        rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule.last_epoch, schedule._last_lr = step, rates
        return rates

    def _step(self, rollout: Rollout, targets: Targets, rows: Tensor, kl_coef: float, log: _Log) -> None:
        """Gradient of one mini-batch, then the optimizer step, unless it went too far or is not finite."""
        self.optimizer.zero_grad()  # an exception in the last step may have left half a gradient
        tokens = int(rollout.completion_mask[rows].sum())
        sums, ratio_error = self._backward(rollout, targets, rows, kl_coef, tokens)
        if log.ratio_error is None:
            log.ratio_error = ratio_error
        if self._args.max_approx_kl is not None and sums["approx_kl"] / tokens > self._args.max_approx_kl:
            log.stopping_kl = sums["approx_kl"] / tokens
        else:
            grad_norm = float(clip_grad_norm_(self._parameters(), self._args.max_grad_norm or math.inf))
            if math.isfinite(grad_norm) and math.isfinite(sums["loss"]):
                self.optimizer.step()
                log.add(sums, tokens, grad_norm)
            else:
                log.skipped += 1
        self.optimizer.zero_grad()

    def _backward(
        self, rollout: Rollout, targets: Targets, rows: Tensor, kl_coef: float, tokens: int
    ) -> tuple[dict[str, float], float]:
        """Accumulate the gradient over micro-batches and processes; sums over tokens and the largest |ratio - 1|."""
        sums: dict[str, float] = {}
        ratio_error = 0.0
        mine = rows[self._accelerator.process_index :: self._accelerator.num_processes]
        for part, idle in passes(self._model, len(mine), self._args.micro_batch_size):
            loss, parts, error = ppo_loss(
                self._model,
                rollout,
                targets,
                rows[:1] if idle else mine[part],
                self._args,
                kl_coef=kl_coef,
                autocast=self._accelerator.autocast,
            )
            (loss * 0 if idle else loss / tokens).backward()
            if idle:
                continue
            parts["loss"] = loss.detach()
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in parts.items()}
            ratio_error = max(ratio_error, float(error))
        if self._accelerator.num_processes == 1:
            return sums, ratio_error
        self._sum_gradients()
        everyone: list[Any] = gather_object([(sums, ratio_error)])
        names = {name: None for part, _ in everyone for name in part}
        return {n: sum(part.get(n, 0.0) for part, _ in everyone) for n in names}, max(e for _, e in everyone)

    def _sum_gradients(self) -> None:
        """Add up gradients over processes in one message. A parameter without gradient counts as zero."""
        parameters = self._parameters()
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        flat = self._accelerator.reduce(flat, "sum")
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = grad.view_as(p).to(p.dtype)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def end_if_never_finite(update: dict[str, float], state: PPOState, args: PPOConfig) -> None:
    """Raise `RuntimeError` when optimizer steps had to be skipped in several iterations in a row."""
    state.nonfinite_iterations = state.nonfinite_iterations + 1 if update["skipped_steps"] else 0
    if state.nonfinite_iterations >= MAX_NONFINITE_ITERATIONS:
        raise RuntimeError(
            f"losses or gradients were NaN or infinite in {MAX_NONFINITE_ITERATIONS} iterations in a row, the last "
            f"time in {int(update['skipped_steps'])} of its optimizer steps; none of them was applied. Usual causes: "
            f"a learning rate too high (learning_rate={args.learning_rate}), or a base model whose activations "
            "overflow in its precision (try dtype='float32')."
        )
