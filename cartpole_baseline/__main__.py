"""Train on CartPole, or on another task with discrete actions, and see how well it went.

    python -m cartpole_baseline                            # PPO on CartPole-v1
    python -m cartpole_baseline --render                   # and a film of the trained policy
    python -m cartpole_baseline --algorithm reinforce      # what PPO grew out of
    python -m cartpole_baseline --env-id Acrobot-v1 --total-steps 100000
    python -m cartpole_baseline --help                     # every setting of PPO

Each run leaves in its folder: log.jsonl, learning_curve.png, policy.safetensors, config.json, evaluation.json.
"""

import argparse
import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers import HfArgumentParser

from cartpole_baseline.config import PPOConfig, ReinforceConfig
from cartpole_baseline.curve import plot, reward_threshold, solved_at
from cartpole_baseline.environments import evaluate, make_envs
from cartpole_baseline.policy import (
    CONFIG_FILE,
    FRESH,
    GIF_FILE,
    POLICY_FILE,
    check_renderable,
    describe,
    final_evaluation,
    render_gif,
    save_policy,
)
from cartpole_baseline.ppo import PPO
from cartpole_baseline.reinforce import Reinforce

LOG_FILE, CURVE_FILE, EVALUATION_FILE = "log.jsonl", "learning_curve.png", "evaluation.json"
FILES = (LOG_FILE, CURVE_FILE, EVALUATION_FILE, POLICY_FILE, CONFIG_FILE, GIF_FILE)
ALGORITHMS = {"ppo": (PPOConfig, PPO), "reinforce": (ReinforceConfig, Reinforce)}


@dataclass(kw_only=True)
class RunArguments:
    """The task, the evaluation, and what is left on disk."""

    algorithm: Literal["ppo", "reinforce"] = field(
        default="ppo", metadata={"help": "Each has its own settings: --algorithm reinforce --help lists those."}
    )
    env_id: str = field(default="CartPole-v1", metadata={"help": "gymnasium task with discrete actions."})
    num_envs: int = field(default=8, metadata={"help": "Environments stepped together."})
    autoreset_mode: Literal["next_step", "same_step"] = field(
        default="next_step",
        metadata={"help": "When gymnasium resets an ended environment. Only next_step has the fast CartPole."},
    )
    max_episode_steps: int | None = field(default=None, metadata={"help": "The timer. None = the task's own."})
    eval_every: int = field(default=1, metadata={"help": "Updates between greedy evaluations; 0 = only at the end."})
    eval_episodes: int = field(default=100, metadata={"help": "Fresh episodes of each evaluation."})
    output_dir: str | None = field(default=None, metadata={"help": "None = runs/cartpole-<date>-<time>."})
    render: bool = field(default=False, metadata={"help": "Film one episode of the trained policy as a GIF."})

    def __post_init__(self) -> None:
        if self.eval_every < 0:
            raise ValueError(f"eval_every must be at least 0, got {self.eval_every}.")
        if self.eval_episodes < 1:
            raise ValueError(f"eval_episodes must be at least 1, got {self.eval_episodes}.")
        if self.output_dir is None:
            self.output_dir = time.strftime("runs/cartpole-%Y%m%d-%H%M%S")
        if not self.output_dir:
            raise ValueError("output_dir is empty: give a folder, or leave it out.")
        if found := [name for name in FILES if (Path(self.output_dir) / name).exists()]:
            raise ValueError(f"{self.output_dir} holds {', '.join(found)} already: give another output_dir.")


def parse(arguments: list[str] | None) -> tuple[RunArguments, PPOConfig | ReinforceConfig]:
    """Command line -> run arguments and the settings of the chosen algorithm; anything else ends with one line."""
    names = {
        "prog": "cartpole_baseline",
        "usage": "python -m cartpole_baseline [--help] [--setting value ...]",
        "description": "Train on CartPole-v1, or on another gymnasium task with discrete actions.",
    }
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, **names)
    first.add_argument("--algorithm", choices=ALGORITHMS, default="ppo")
    algorithm = first.parse_known_args(arguments)[0].algorithm
    parser = HfArgumentParser((RunArguments, ALGORITHMS[algorithm][0]), allow_abbrev=False, **names)
    try:
        run, config, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if unknown:
        parser.error(
            f"unknown settings of {algorithm}: {' '.join(unknown)} (--algorithm {algorithm} --help lists all)"
        )
    return run, config


def train(run: RunArguments, config: PPOConfig | ReinforceConfig) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """Train with a progress bar and greedy evaluations in between; every update goes to log.jsonl at once.

    Returns:
        The actor, and one dict of numbers per update.

    Raises:
        ValueError: settings that make no sense together, or an interrupt before the first update.
    """
    envs = make_envs(
        run.env_id, run.num_envs, autoreset_mode=run.autoreset_mode, max_episode_steps=run.max_episode_steps
    )
    algorithm = ALGORITHMS[run.algorithm][1](envs, config)
    test_envs = make_envs(run.env_id, run.eval_episodes, max_episode_steps=run.max_episode_steps)
    folder = Path(run.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder output_dir={str(folder)!r}: {error.strerror}.") from error
    log: list[dict[str, Any]] = []
    seconds, started = 0.0, time.perf_counter()
    with (
        (folder / LOG_FILE).open("w", encoding="utf-8") as file,
        tqdm(total=config.total_steps, unit="step") as bar,
        suppress(KeyboardInterrupt),  # Ctrl-C ends training; what was learned is evaluated and saved
    ):
        for update, metrics in enumerate(algorithm.train(), start=1):
            seconds += time.perf_counter() - started  # evaluation is not training
            line = {"update": update, **metrics, "seconds": seconds}
            if run.eval_every and update % run.eval_every == 0:
                line["greedy_return"] = float(
                    evaluate(test_envs, algorithm.actor, greedy=True, seed=FRESH + config.seed).mean()
                )
            file.write(json.dumps(line) + "\n")
            file.flush()
            log.append(line)
            shown = {"return": "episode_return", "greedy": "greedy_return", "KL": "approx_kl"}
            bar.set_postfix({name: f"{line[key]:.3g}" for name, key in shown.items() if key in line}, refresh=False)
            bar.update(metrics["step"] - bar.n)
            started = time.perf_counter()
    envs.close()
    test_envs.close()
    if not log:
        raise ValueError("interrupted before the first update: nothing was learned.")
    return algorithm.actor, log


def main(arguments: list[str] | None = None) -> None:
    """Command line: train, evaluate, save, plot, and film if asked."""
    torch.set_num_threads(1)  # these networks are so small that a second thread only waits
    run, config = parse(arguments)
    try:
        if run.render:
            check_renderable(run.env_id)
        actor, log = train(run, config)
        settings = asdict(run) | asdict(config)
        folder = Path(run.output_dir)
        save_policy(folder, actor, settings)
        results = final_evaluation(actor, settings, episodes=run.eval_episodes, seed=2 * FRESH + config.seed)
    except (ValueError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
    threshold = reward_threshold(run.env_id)
    if threshold is not None and run.eval_every:
        results["solved_at_step"] = solved_at(log, threshold)
    (folder / EVALUATION_FILE).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot(folder / CURVE_FILE, log, title=f"{run.algorithm} on {run.env_id}, seed {config.seed}", threshold=threshold)
    print(f"\n{log[-1]['step']:,} environment steps in {log[-1]['seconds']:.1f} s of training")
    if "solved_at_step" in results:
        step = results["solved_at_step"]
        print(f"greedy evaluation reaches {threshold:g} and stays: " + ("never" if step is None else f"step {step:,}"))
    print(describe(results))
    print("\nSaved:")
    saved = {"policy": POLICY_FILE, "curve": CURVE_FILE, "metrics": LOG_FILE, "evaluation": EVALUATION_FILE}
    if run.render:
        render_gif(folder / GIF_FILE, actor, settings, seed=results["seed"])
        saved["film"] = GIF_FILE
    for what, name in saved.items():
        print(f"  {what:10} {folder / name}")


if __name__ == "__main__":
    main()
