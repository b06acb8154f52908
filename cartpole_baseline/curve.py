"""The learning curve of a run, as a picture and as one number."""

from pathlib import Path
from typing import Any

import gymnasium as gym
from matplotlib.figure import Figure

DETAILS = [
    ("value_loss", "value loss"),
    ("explained_variance", "explained variance"),
    ("entropy", "entropy, nats"),
    ("approx_kl", "approximate KL, nats"),
    ("clip_fraction", "clip fraction"),
    ("grad_norm", "gradient norm"),
]


def plot(path: Path, log: list[dict[str, Any]], *, title: str, threshold: float | None) -> None:
    """Returns over environment steps, and below them what the updates did.

    Args:
        path: of the PNG.
        log: one dict of numbers per update.
        title: of the figure.
        threshold: return that counts as solved, drawn as a line; None = no line.
    """
    details = [(key, label) for key, label in DETAILS if key in log[0]]
    figure = Figure(figsize=(10, 7), layout="constrained")
    grid = figure.add_gridspec(2, len(details), height_ratios=[2, 1])
    figure.suptitle(title)
    top = figure.add_subplot(grid[0, :])
    for key, label in [("episode_return", "training episodes (sampled)"), ("greedy_return", "greedy evaluation")]:
        rows = [line for line in log if key in line]
        top.plot([line["step"] for line in rows], [line[key] for line in rows], marker=".", label=label)
    if threshold is not None:
        top.axhline(threshold, color="grey", linestyle=":", label=f"solved: {threshold:g}")
    top.set(xlabel="environment steps", ylabel="return of an episode")
    top.legend()
    top.grid(alpha=0.3)
    for column, (key, label) in enumerate(details):
        axes = figure.add_subplot(grid[1, column])
        axes.plot([line["step"] for line in log], [line[key] for line in log])
        axes.set_title(label, fontsize="small")
        axes.tick_params(labelsize="x-small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def reward_threshold(env_id: str) -> float | None:
    """The mean return at which gymnasium counts a task as solved, if it says."""
    return gym.spec(env_id).reward_threshold


def solved_at(log: list[dict[str, Any]], threshold: float) -> int | None:
    """Step of the first greedy evaluation from which on none is below the threshold; None if the last one is."""
    evaluated = [line for line in log if "greedy_return" in line]
    below = [i for i, line in enumerate(evaluated) if line["greedy_return"] < threshold]
    first = below[-1] + 1 if below else 0
    return evaluated[first]["step"] if first < len(evaluated) else None
