"""The progress of a run, in one place: all that a checkpoint needs besides weights and optimizer moments."""

from dataclasses import dataclass, field

from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerState

from rlhf_kit.config import PPOConfig


@dataclass
class RunningMoments:
    """Count, mean and sum of squared deviations of all numbers seen (Welford's update, in float64)."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def update(self, x: Tensor) -> float:
        """Take in the elements of x.

        Returns:
            The biased standard deviation of everything seen so far.
        """
        x = x.detach().double()
        n, mean = x.numel(), float(x.mean())
        delta, total = mean - self.mean, self.count + n
        self.m2 += float((x - mean).square().sum()) + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count = total
        return float((self.m2 / self.count) ** 0.5)


@dataclass
class PPOState(TrainerState):
    """Everything about the progress of a run that is not a weight or an optimizer moment.

    Attributes:
        iteration: iterations finished.
        num_iterations: iterations planned.
        episodes: completions learned from.
        kl_coef: coefficient of the next iteration.
        score_moments: of all scores so far, for `scale_scores`.
        evaluation_due: an evaluation belongs here that a signal kept from being made.
        completions_logged: lines that this run has written to its file of completions.
        nonfinite_iterations: iterations in a row, up to now, in which an optimizer step was skipped.
        global_step, log_history, is_world_process_zero: as in transformers.
    """

    iteration: int = 0
    num_iterations: int = 0
    episodes: int = 0
    kl_coef: float = 0.0
    score_moments: RunningMoments = field(default_factory=RunningMoments)
    evaluation_due: bool = False
    nonfinite_iterations: int = 0
    completions_logged: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.score_moments, dict):  # as `load_from_json` gives it
            self.score_moments = RunningMoments(**self.score_moments)


def last_metrics(state: PPOState) -> dict[str, float]:
    """The newest logged metrics of an iteration; none before the first."""
    lines = [line for line in state.log_history if "score" in line]
    return lines[-1] if lines else {}


def first_state(args: PPOConfig, accelerator: Accelerator) -> PPOState:
    """Before the first iteration."""
    return PPOState(
        num_iterations=args.num_iterations,
        max_steps=args.num_iterations * args.optimizer_steps_per_iteration(),
        kl_coef=args.kl_coef,
        is_local_process_zero=accelerator.is_local_main_process,
        is_world_process_zero=accelerator.is_main_process,
    )
