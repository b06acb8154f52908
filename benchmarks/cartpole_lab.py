"""Three claims about PPO, measured on CartPole-v1: the curves and tables of docs/cartpole.md.

    python benchmarks/cartpole_lab.py                 # all three, five seeds each
    python benchmarks/cartpole_lab.py clipping        # one of: reinforce, clipping, timer

Writes one picture per claim and prints one Markdown table per claim.
"""

import argparse
import statistics
from pathlib import Path

import numpy as np
import torch
from gymnasium.vector import VectorWrapper
from matplotlib.figure import Figure

from cartpole_baseline.config import PPOConfig, ReinforceConfig
from cartpole_baseline.environments import evaluate, make_envs
from cartpole_baseline.ppo import PPO
from cartpole_baseline.reinforce import Reinforce

EPISODES, FRESH = 50, 1_000_000
IMAGES = Path(__file__).parents[1] / "docs" / "images"


class TimerAsFall(VectorWrapper):
    """The mistake: what the timer cut is reported as having ended by itself."""

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        return observations, rewards, terminated | truncated, np.zeros_like(truncated), infos


def train(algorithm, *, every=1, seed=0, watch=None):
    """Curves of one run: environment steps, greedy return, episode return, approximate KL, and what `watch` reads."""
    test_envs = make_envs("CartPole-v1", EPISODES)
    rows = []
    for update, metrics in enumerate(algorithm.train(), start=1):
        if update % every == 0:
            greedy = evaluate(test_envs, algorithm.actor, greedy=True, seed=FRESH + seed).mean()
            row = {"step": metrics["step"], "greedy": greedy, "approx_kl": metrics.get("approx_kl", 0.0)}
            rows.append(row | ({"watched": watch(algorithm)} if watch else {}))
    sampled = evaluate(test_envs, algorithm.actor, greedy=False, seed=2 * FRESH + seed).mean()
    return {key: np.array([row[key] for row in rows]) for key in rows[0]} | {"sampled": sampled}


def value_of_the_start(algorithm):
    """Mean V of the same 64 starting states."""
    starts = make_envs("CartPole-v1", 64).reset(seed=FRESH)[0]
    with torch.no_grad():
        return float(algorithm.critic(torch.from_numpy(starts)).mean())


def draw(axes, runs, key, label, color):
    """Every seed thin, their median thick, on a common grid of steps."""
    grid = np.linspace(0, min(run["step"][-1] for run in runs), 60)
    curves = np.array([np.interp(grid, run["step"], run[key]) for run in runs])
    axes.plot(grid, curves.T, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(grid, np.median(curves, axis=0), color=color, label=label)


def picture(path, panels):
    """One row of panels; each is (title, y label, key, log scale, {label: runs})."""
    figure = Figure(figsize=(5.2 * len(panels), 3.8), layout="constrained")
    for axes, (title, ylabel, key, log, groups) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for color, (label, runs) in zip(("tab:blue", "tab:orange", "tab:green"), groups.items(), strict=False):
            draw(axes, runs, key, label, color)
        axes.set(title=title, xlabel="environment steps", ylabel=ylabel, yscale="log" if log else "linear")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def spread(values, form="{:.0f}"):
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"


def solved(run):
    """Steps of the first evaluation from which on none is below 475; infinity if the last one is."""
    below = np.flatnonzero(run["greedy"] < 475)
    first = below[-1] + 1 if len(below) else 0
    return float(run["step"][first]) if first < len(run["step"]) else float("inf")


def second_half(run):
    """Greedy returns of the evaluations in the second half of the steps."""
    return run["greedy"][run["step"] > run["step"][-1] / 2]


def reinforce(seeds, path):
    makers = {
        "PPO": lambda seed: PPO(make_envs("CartPole-v1", 8), PPOConfig(seed=seed, total_steps=60_000)),
        "REINFORCE": lambda seed: Reinforce(
            make_envs("CartPole-v1", 8), ReinforceConfig(seed=seed, total_steps=60_000)
        ),
        "REINFORCE, three times the learning rate": lambda seed: Reinforce(
            make_envs("CartPole-v1", 8), ReinforceConfig(seed=seed, total_steps=60_000, learning_rate=3e-2)
        ),
    }
    groups = {name: [train(make(seed), seed=seed) for seed in seeds] for name, make in makers.items()}
    picture(path, [("PPO and REINFORCE", "greedy return", "greedy", False, groups)])
    print("\n| algorithm | reaches 475 and stays, steps | second half of the steps: mean | lowest |")
    print("|---|---:|---:|---:|")
    for name, runs in groups.items():
        mean, lowest = ([f(second_half(run)) for run in runs] for f in (np.mean, np.min))
        print(f"| {name} | {spread([solved(run) for run in runs], '{:,.0f}')} | {spread(mean)} | {spread(lowest)} |")


def clipping(seeds, path):
    groups = {}
    for name, clip_range in [("clip range 0.2", 0.2), ("no clipping", float("inf"))]:
        settings = {"ppo_epochs": 40, "clip_range": clip_range}
        groups[name] = [train(PPO(make_envs("CartPole-v1", 8), PPOConfig(seed=s, **settings)), seed=s) for s in seeds]
    picture(
        path,
        [
            ("40 epochs per rollout", "greedy return", "greedy", False, groups),
            ("how far one update moves", "approximate KL, nats", "approx_kl", True, groups),
        ],
    )
    print(
        "\n| 40 epochs per rollout | greedy, last 10 evaluations | sampled, at the end | approximate KL of an update |"
    )
    print("|---|---:|---:|---:|")
    for name, runs in groups.items():
        last = [run["greedy"][-10:].mean() for run in runs]
        moved = [run["approx_kl"].mean() for run in runs]
        print(f"| {name} | {spread(last)} | {spread([run['sampled'] for run in runs])} | {spread(moved, '{:.3f}')} |")


def timer(seeds, path):
    groups = {}
    for name, wrap in [("bootstrapped", lambda envs: envs), ("treated as a fall", TimerAsFall)]:
        groups[name] = [
            train(
                PPO(wrap(make_envs("CartPole-v1", 8, max_episode_steps=100)), PPOConfig(seed=s)),
                seed=s,
                watch=value_of_the_start,
            )
            for s in seeds
        ]
    picture(
        path,
        [
            ("timer of 100 steps in training", "V(start)", "watched", False, groups),
            ("the same policies, played for 500 steps", "greedy return", "greedy", False, groups),
        ],
    )
    print(
        "\n| a timer of 100 steps is | V(start) at the end | greedy return of 500, at the end | sampled, at the end |"
    )
    print("|---|---:|---:|---:|")
    for name, runs in groups.items():
        print(
            f"| {name} | {spread([run['watched'][-1] for run in runs], '{:.1f}')} | "
            f"{spread([run['greedy'][-1] for run in runs])} | {spread([run['sampled'] for run in runs])} |"
        )


CLAIMS = {"reinforce": reinforce, "clipping": clipping, "timer": timer}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="claim", help=f"any of {', '.join(CLAIMS)}; none = all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder for the pictures")
    args = parser.parse_args()
    if unknown := set(args.claims) - set(CLAIMS):
        parser.error(f"unknown claims: {', '.join(sorted(unknown))}; choose from {', '.join(CLAIMS)}")
    torch.set_num_threads(1)
    args.images.mkdir(parents=True, exist_ok=True)
    for name in args.claims or CLAIMS:
        CLAIMS[name](range(args.seeds), args.images / f"cartpole_{name}.png")


if __name__ == "__main__":
    main()
