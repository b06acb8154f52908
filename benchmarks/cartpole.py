"""CartPole-v1: ours beside stable-baselines3 with the settings of the RL Zoo, seed by seed in turn, in one run.

    make benchmark-cartpole                                # ten seeds; installs the peer into .venv-sb3
    make benchmark-cartpole ARGS="--seeds 3"
    python benchmarks/cartpole.py --ours-only --seeds 50   # how far the seeds spread

Both play gymnasium's CartPole-v1 and are judged by the same function: after every 1,024 environment steps the greedy
policy plays 100 fresh episodes. "Solved" is the first such evaluation from which on none is below 475. Seconds are
those of building the model, playing and learning; evaluation, and the second that torch takes to import what its
optimizers need, are left out for both. Each run is a process of its own, on one CPU thread. At the end ours is also
judged as a user would: greedy and sampled, on 100 episodes that no evaluation has used.

RL Zoo settings of PPO for CartPole-v1 (github.com/DLR-RM/rl-baselines3-zoo, hyperparams/ppo.yml): 8 environments, 32
steps, batch 256, 20 epochs, gamma 0.98, lambda 0.8, no entropy bonus, learning rate 1e-3 and clip range 0.2 that both
fall linearly to 0 over 100,000 steps.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

EVALUATE_EVERY = 1024  # environment steps
EPISODES, THRESHOLD = 100, 475
FRESH = 1_000_000  # seed of the evaluation episodes
ROOT = Path(__file__).parents[1]
PEER = ROOT / ".venv-sb3" / "bin" / "python"


class Clock:
    """Seconds of a run without its evaluations, and what these found."""

    def __init__(self, act, test_envs):
        self.act, self.test_envs = act, test_envs  # act: (N, 4) observations -> (N,) greedy actions
        self.started, self.paused, self.found = time.perf_counter(), 0.0, []

    def evaluate(self, steps):
        now = time.perf_counter()
        self.found.append((steps, now - self.started - self.paused, play(self.test_envs, self.act, FRESH).mean()))
        self.paused += time.perf_counter() - now

    def result(self):
        below = [i for i, (_, _, mean) in enumerate(self.found) if mean < THRESHOLD]
        first = below[-1] + 1 if below else 0
        solved = first < len(self.found)
        steps, seconds, _ = self.found[first if solved else -1]
        return {"solved": solved, "steps": steps, "seconds": seconds, "total_seconds": self.found[-1][1]}


def play(envs, act, seed):
    """(N,) returns of one whole episode in each environment."""
    import numpy as np

    returns, playing = np.zeros(envs.num_envs), np.ones(envs.num_envs, dtype=bool)
    observations = envs.reset(seed=seed)[0]
    while playing.any():
        observations, rewards, terminated, truncated, _ = envs.step(act(observations))
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    return returns


def run_ours(seed):
    import torch

    from cartpole_baseline.config import PPOConfig
    from cartpole_baseline.environments import make_envs
    from cartpole_baseline.ppo import PPO, sample

    test_envs = make_envs("CartPole-v1", EPISODES)
    generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def greedy(observations):
        return algorithm.actor(torch.from_numpy(observations)).argmax(-1).numpy()

    @torch.no_grad()
    def sampled(observations):
        return sample(algorithm.actor(torch.from_numpy(observations)), generator).numpy()

    clock = Clock(greedy, test_envs)
    algorithm = PPO(make_envs("CartPole-v1", 8), PPOConfig(seed=seed))
    for metrics in algorithm.train():
        clock.evaluate(metrics["step"])
    final = {}
    for name, act in [("greedy", greedy), ("sampled", sampled)]:
        returns = play(test_envs, act, 2 * FRESH + seed)
        final |= {f"{name}_mean": returns.mean(), f"{name}_median": statistics.median(returns)}
    return clock.result() | final


def run_sb3(seed):
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Evaluate(BaseCallback):
        def _on_rollout_start(self):  # the update on the last rollout is done here
            if self.num_timesteps and self.num_timesteps % EVALUATE_EVERY == 0:
                clock.evaluate(self.num_timesteps)

        def _on_training_end(self):
            clock.evaluate(self.num_timesteps)

        def _on_step(self):
            return True

    test_envs = gymnasium.make_vec("CartPole-v1", EPISODES)
    clock = Clock(lambda observations: model.predict(observations, deterministic=True)[0], test_envs)
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", n_envs=8, seed=seed), n_steps=32, batch_size=256, n_epochs=20,
        gamma=0.98, gae_lambda=0.8, ent_coef=0.0, learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left, seed=seed, device="cpu",
    )  # fmt: skip
    model.learn(100_000, callback=Evaluate())
    return clock.result()


def run_one(name, seed):
    import torch
    import torch._dynamo  # imported by the first optimizer, whoever makes it

    torch.set_num_threads(1)
    print(json.dumps({"ours": run_ours, "sb3": run_sb3}[name](seed)))


def launch(python, name, seed):
    command = [str(python), __file__, "--run", name, "--seed", str(seed)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def until_solved(row):
    return f"{'' if row['solved'] else 'not by '}{row['steps']:,} | {row['seconds']:.2f}"


def spread(rows, key, form):
    values = [row[key] for row in rows]
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"


def summary(ours, peer):
    """Medians and spreads, and the two ratios."""
    print("\nmedian (min to max)")
    for name, rows in [("ours", ours), ("SB3", peer)]:
        if rows:
            print(f"  {name:5} steps until solved  {spread(rows, 'steps', '{:,.0f}')}")
            print(f"        seconds             {spread(rows, 'seconds', '{:.2f}')}")
            print(f"        whole run, seconds  {spread(rows, 'total_seconds', '{:.2f}')}")
            print(f"        solved              {sum(row['solved'] for row in rows)} of {len(rows)} seeds")
    for key in ("greedy_mean", "sampled_mean", "greedy_median", "sampled_median"):
        print(f"  ours, final {key.replace('_', ' '):15} {spread(ours, key, '{:.1f}')}")
    if peer:
        seconds = [statistics.median(row["seconds"] for row in rows) for rows in (ours, peer)]
        steps = [statistics.median(row["steps"] for row in rows) for rows in (ours, peer)]
        print(
            f"  median seconds, SB3 / ours {seconds[1] / seconds[0]:.1f}; steps, ours / SB3 {steps[0] / steps[1]:.2f}"
        )
    print(f"  {platform.machine()}, Python {platform.python_version()}, one thread per run")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0 to this less one")
    parser.add_argument("--ours-only", action="store_true", help="without the peer")
    parser.add_argument("--peer-python", type=Path, default=PEER, help="has stable-baselines3")
    parser.add_argument("--run", choices=["ours", "sb3"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run_one(args.run, args.seed)
    if not args.ours_only and not args.peer_python.exists():
        parser.error(f"{args.peer_python} does not exist: `make benchmark-cartpole` installs it.")

    peer_columns = "" if args.ours_only else " SB3: steps | seconds | seconds SB3 / ours |"
    print(f"| seed | ours: steps | seconds | greedy | sampled |{peer_columns}")
    print("|---:|---:|---:|---:|---:|" + "---:|" * peer_columns.count("|"))
    ours, peer = [], []
    for seed in range(args.seeds):
        row = launch(sys.executable, "ours", seed)
        ours.append(row)
        line = f"| {seed} | {until_solved(row)} | {row['greedy_mean']:.1f} | {row['sampled_mean']:.1f} |"
        if not args.ours_only:
            peer.append(launch(args.peer_python, "sb3", seed))
            line += f" {until_solved(peer[-1])} | {peer[-1]['seconds'] / row['seconds']:.1f} |"
        print(line, flush=True)
    summary(ours, peer)


if __name__ == "__main__":
    main()
