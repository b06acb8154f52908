"""A trained policy on disk: save it, load it, watch it.

python -m cartpole_baseline.policy runs/cartpole-...            # plays 100 fresh episodes
python -m cartpole_baseline.policy runs/cartpole-... --render   # and films one
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cartpole_baseline.environments import evaluate, make_env, make_envs
from cartpole_baseline.ppo import make_actor

POLICY_FILE, CONFIG_FILE, GIF_FILE = "policy.safetensors", "config.json", "policy.gif"
MAX_FRAMES = 500  # of the film; every second step is one, so 1,000 steps
FRESH = 1_000_000  # added to the seed of a run, so that evaluation starts from states that training has not seen


def save_policy(folder: Path, actor: nn.Module, settings: dict[str, Any]) -> None:
    """Write weights and settings; `settings` must hold env_id, max_episode_steps, hidden_size and seed."""
    save_file(actor.state_dict(), folder / POLICY_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_policy(folder: str | Path) -> tuple[nn.Sequential, dict[str, Any]]:
    """The actor of a finished run, and the run's settings.

    Raises:
        ValueError: the folder is not that of a finished run, or its weights do not fit its settings.
    """
    folder = Path(folder)
    if missing := [name for name in (POLICY_FILE, CONFIG_FILE) if not (folder / name).exists()]:
        raise ValueError(f"{folder} holds no {' and no '.join(missing)}: give the output_dir of a finished run.")
    settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    envs = make_envs(settings["env_id"], 1)
    actor = make_actor(envs, settings["hidden_size"], torch.Generator())
    envs.close()
    try:
        actor.load_state_dict(load_file(folder / POLICY_FILE))
    except RuntimeError as error:
        raise ValueError(f"{folder / POLICY_FILE} does not fit {folder / CONFIG_FILE}: {error}") from error
    return actor, settings


def final_evaluation(actor: nn.Module, settings: dict[str, Any], *, episodes: int, seed: int) -> dict[str, Any]:
    """Greedy and sampled policy on the same fresh starts: mean, median, minimum and maximum return."""
    envs = make_envs(settings["env_id"], episodes, max_episode_steps=settings["max_episode_steps"])
    results: dict[str, Any] = {"episodes": episodes, "seed": seed}
    for name in ("greedy", "sampled"):
        returns = evaluate(envs, actor, greedy=name == "greedy", seed=seed)
        figures = {"mean": returns.mean(), "median": np.median(returns), "min": returns.min(), "max": returns.max()}
        results[name] = {key: float(value) for key, value in figures.items()}
    envs.close()
    return results


def describe(results: dict[str, Any]) -> str:
    """The result of `final_evaluation`, in lines."""
    head = f"{results['episodes']} fresh episodes        mean   median      min      max"
    rows = [
        f"  {name:<20}" + "".join(f"{results[name][key]:9.1f}" for key in ("mean", "median", "min", "max"))
        for name in ("greedy", "sampled")
    ]
    return "\n".join([head, *rows])


def check_renderable(env_id: str) -> None:
    """Draw one frame, so that what is missing shows before any training.

    Raises:
        ValueError: the task cannot be drawn here, or pillow is missing.
    """
    try:
        import PIL.Image  # noqa: F401

        env = make_env(env_id, render_mode="rgb_array")
        env.reset()
        frame = env.render()
        env.close()
    except (gym.error.Error, ImportError) as error:
        raise ValueError(f'cannot draw {env_id}: {error}. Run: pip install "rlhf_kit[cartpole]"') from error
    if not isinstance(frame, np.ndarray):
        raise ValueError(f"cannot draw {env_id}: it has no render mode rgb_array.")


@torch.no_grad()
def render_gif(path: Path, actor: nn.Module, settings: dict[str, Any], *, seed: int) -> int:
    """Film one greedy episode, half size, every second step; returns how many steps it took."""
    from PIL import Image

    env = make_env(settings["env_id"], max_episode_steps=settings["max_episode_steps"], render_mode="rgb_array")
    observation, frames, ended, steps = env.reset(seed=seed)[0], [], False, 0
    while not ended and len(frames) < MAX_FRAMES:
        if steps % 2 == 0:
            frames.append(Image.fromarray(env.render()).reduce(2).quantize(32))
        action = actor(torch.from_numpy(np.array(observation, dtype=np.float32))).argmax(-1)
        observation, _, terminated, truncated, _ = env.step(int(action))
        ended, steps = terminated or truncated, steps + 1
    duration = round(2000 / env.metadata.get("render_fps", 30))  # milliseconds of two steps
    env.close()
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=duration, loop=0)
    return steps


def main(arguments: list[str] | None = None) -> None:
    """Command line: evaluate, and film if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m cartpole_baseline.policy", description="Play a trained policy.", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="output_dir of a finished run")
    parser.add_argument("--episodes", type=int, default=100, help="fresh episodes, each greedy and sampled")
    parser.add_argument("--seed", type=int, default=FRESH, help="of these episodes")
    parser.add_argument("--render", action="store_true", help="film one greedy episode as policy.gif")
    args = parser.parse_args(arguments)
    try:
        actor, settings = load_policy(args.folder)
        if args.render:
            check_renderable(settings["env_id"])
        print(describe(final_evaluation(actor, settings, episodes=args.episodes, seed=args.seed)))
        if args.render:
            steps = render_gif(args.folder / GIF_FILE, actor, settings, seed=args.seed)
            print(f"{args.folder / GIF_FILE}: one greedy episode of {steps} steps")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
