"""The commands as a user types them: what they leave behind, and what they say when something is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from PIL import Image

from cartpole_baseline.__main__ import main
from cartpole_baseline.config import PPOConfig
from cartpole_baseline.curve import solved_at
from cartpole_baseline.environments import evaluate, make_env, make_envs
from cartpole_baseline.policy import load_policy
from cartpole_baseline.policy import main as play_main
from cartpole_baseline.ppo import PPO

pytestmark = pytest.mark.usefixtures("one_thread")

COMMON = ["--total-steps", "512", "--eval-episodes", "3"]
SMALL = [*COMMON, "--num-steps", "32"]


def run(folder, *arguments):
    common = COMMON if "reinforce" in arguments else SMALL
    main([*common, "--output-dir", str(folder), *arguments])
    return folder


def read(folder, name):
    text = (folder / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def test_a_run_leaves_log_curve_policy_evaluation_and_film(tmp_path, capsys):
    folder = run(tmp_path / "run", "--render")
    log = read(folder, "log.jsonl")
    assert [line["step"] for line in log] == [256, 512]
    assert all(line["greedy_return"] > 0 and line["seconds"] > 0 for line in log)
    with Image.open(folder / "learning_curve.png") as picture:
        assert picture.width > 500
        assert len(np.unique(np.asarray(picture.convert("L")))) > 50
    with Image.open(folder / "policy.gif") as film:
        assert film.n_frames > 2
        first = np.asarray(film.convert("L"))
        film.seek(film.n_frames - 1)
        assert (np.asarray(film.convert("L")) != first).any()
    evaluation = read(folder, "evaluation.json")
    for name in ("greedy", "sampled"):
        figures = evaluation[name]
        assert figures["min"] <= figures["median"] <= figures["max"]
        assert 5 < figures["mean"] < 500
    assert "solved_at_step" in evaluation
    output = capsys.readouterr().out
    for name in (
        "learning_curve.png",
        "policy.gif",
        "policy.safetensors",
        "greedy",
        "sampled",
        "512 environment steps",
    ):
        assert name in output


def test_the_saved_policy_plays_as_it_did_at_the_end(tmp_path, capsys):
    folder = run(tmp_path / "run")
    evaluation = read(folder, "evaluation.json")
    actor, settings = load_policy(folder)
    assert (settings["env_id"], settings["gae_lambda"]) == ("CartPole-v1", settings["gae_lambda"])
    for name in ("greedy", "sampled"):
        returns = evaluate(make_envs("CartPole-v1", 3), actor, greedy=name == "greedy", seed=evaluation["seed"])
        assert returns.mean() == evaluation[name]["mean"]
    capsys.readouterr()
    play_main([str(folder), "--episodes", "3", "--seed", str(evaluation["seed"]), "--render"])
    assert f"{evaluation['greedy']['mean']:9.1f}" in capsys.readouterr().out
    assert (folder / "policy.gif").exists()


@pytest.mark.slow
def test_the_same_seed_twice_gives_the_same_files(tmp_path):
    # kills: anything in a run that depends on more than its settings. Two processes.
    command = [sys.executable, "-m", "cartpole_baseline", *SMALL, "--output-dir"]
    for name in ("a", "b"):
        subprocess.run(
            [*command, str(tmp_path / name)], check=True, cwd=Path(__file__).parents[2], capture_output=True
        )
    weights = [(tmp_path / name / "policy.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    logs = [read(tmp_path / name, "log.jsonl") for name in ("a", "b")]
    for line in logs[0] + logs[1]:
        del line["seconds"]
    assert logs[0] == logs[1]
    assert read(tmp_path / "a", "evaluation.json") == read(tmp_path / "b", "evaluation.json")
    run(tmp_path / "c", "--seed", "1")
    assert (tmp_path / "c" / "policy.safetensors").read_bytes() != weights[0]


def test_seconds_add_up(tmp_path):
    # kills: the seconds of one update instead of all so far
    log = read(run(tmp_path / "run", "--total-steps", "3072"), "log.jsonl")
    seconds = [line["seconds"] for line in log]
    assert len(seconds) == 12
    assert seconds == sorted(seconds)


def test_reinforce_is_a_flag(tmp_path):
    folder = run(tmp_path / "run", "--algorithm", "reinforce")
    assert read(folder, "config.json")["algorithm"] == "reinforce"
    assert "clip_fraction" not in read(folder, "log.jsonl")[0]
    assert load_policy(folder)[1]["learning_rate"] == read(folder, "config.json")["learning_rate"]


@pytest.mark.parametrize("env_id", ["Acrobot-v1", "FrozenLake-v1", "CartPole-v0", "Blackjack-v1"])
def test_other_tasks_with_discrete_actions(env_id, tmp_path):
    # Box, Discrete and Tuple observations; with and without a vectorised version; with and without a timer
    folder = run(tmp_path / "run", "--env-id", env_id)
    assert read(folder, "evaluation.json")["greedy"]["max"] >= read(folder, "evaluation.json")["greedy"]["min"]
    assert load_policy(folder)[1]["env_id"] == env_id


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_both_autoreset_modes_and_another_timer(mode, tmp_path):
    folder = run(tmp_path / "run", "--autoreset-mode", mode, "--max-episode-steps", "12")
    evaluation = read(folder, "evaluation.json")
    assert evaluation["greedy"]["max"] <= 12
    assert max(line["episode_return"] for line in read(folder, "log.jsonl")) <= 12


def test_evaluation_now_and_then_or_never(tmp_path):
    # kills: eval_every ignored
    often = read(run(tmp_path / "a", "--eval-every", "2"), "log.jsonl")
    assert ["greedy_return" in line for line in often] == [False, True]
    folder = run(tmp_path / "b", "--eval-every", "0")
    assert not any("greedy_return" in line for line in read(folder, "log.jsonl"))
    assert "solved_at_step" not in read(folder, "evaluation.json")


WRONG = [
    (["--env-id", "CartPol-v1"], "CartPol"),
    (["--env-id", "Pendulum-v1"], "only discrete actions are supported"),
    (["--env-id", "no_such_module:Task-v0"], "no_such_module"),
    (["--total-steps", "100"], "less than one rollout of num_envs=8 x num_steps=32 = 256"),
    (["--num-mini-batches", "200"], "num_mini_batches=200 is more than the 128 steps"),
    (["--num-steps", "1"], "num_steps must be at least 2"),
    (["--num-envs", "0"], "num_envs must be at least 1, got 0"),
    (["--max-episode-steps", "0"], "max_episode_steps must be at least 1, got 0"),
    (["--ppo-epochs", "0"], "ppo_epochs must be at least 1, got 0"),
    (["--gamma", "1.5"], "gamma must be in [0, 1], got 1.5"),
    (["--learning-rate", "nan"], "learning_rate must be above 0 and finite, got nan"),
    (["--clip-range", "0"], "clip_range must be above 0"),
    (["--hidden-size", "x"], "invalid int value: 'x'"),
    (["--seed", "-1"], "seed must be at least 0"),
    (["--seed", str(10**30)], "below 2**32"),
    (["--output-dir", ""], "output_dir is empty"),
    (["--output-dir", "/dev/null/run"], "cannot make the folder output_dir='/dev/null/run'"),
    (["--eval-episodes", "0"], "eval_episodes must be at least 1"),
    (["--learning-rat", "1"], "unknown settings of ppo: --learning-rat"),
    (["--algorithm", "reinforce", "--clip-range", "0.1"], "unknown settings of reinforce: --clip-range"),
    (["--algorithm", "dqn"], "invalid choice: 'dqn'"),
    (["--autoreset-mode", "never"], "invalid choice: 'never'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", *arguments)
    assert stop.value.code not in (0, None)
    said = f"{capsys.readouterr().err}\n{stop.value.code}"
    (line,) = [line for line in said.splitlines() if "error: " in line]
    assert message in line
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_overwritten(tmp_path, capsys):
    folder = run(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SystemExit):
        run(folder, "--seed", "1")
    assert "holds log.jsonl, learning_curve.png" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_files_of_somebody_else_are_not_overwritten(tmp_path, capsys):
    # kills: a check for our log only. Every model folder has a config.json.
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(SystemExit):
        run(tmp_path)
    assert "holds config.json already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("after", [0, 1])
def test_ctrl_c_ends_training_and_keeps_what_was_learned(after, tmp_path, monkeypatch):
    # kills: a traceback instead of a policy
    learn, calls = PPO.learn, []

    def interrupted(self, rollout):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return learn(self, rollout)

    monkeypatch.setattr(PPO, "learn", interrupted)
    if after:
        folder = run(tmp_path / "run")
        assert [line["step"] for line in read(folder, "log.jsonl")] == [256]
        assert load_policy(folder)[1]["env_id"] == "CartPole-v1"
    else:
        with pytest.raises(SystemExit, match="nothing was learned"):
            run(tmp_path / "run")


def test_a_folder_without_a_policy_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        play_main([str(tmp_path)])
    assert "holds no policy.safetensors and no config.json" in capsys.readouterr().err


def test_a_policy_that_does_not_fit_its_settings_is_refused(tmp_path):
    folder = run(tmp_path / "run")
    settings = read(folder, "config.json") | {"hidden_size": 5}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="does not fit"):
        load_policy(folder)


def test_evaluation_counts_one_whole_episode_of_each_environment():
    # kills: the first episodes to end, wherever; sums that go on after an end
    envs = make_envs("CartPole-v1", 20)
    torch.manual_seed(0)
    actor = torch.nn.Linear(4, 2)
    returns = evaluate(envs, actor, greedy=True, seed=3)
    assert returns.max() > returns.min() + 5  # else nothing goes on after an end
    env = make_env("CartPole-v1")
    starts = make_envs("CartPole-v1", 20).reset(seed=3)[0]
    for start, expected in zip(starts, returns, strict=True):
        env.reset()
        env.unwrapped.state = start.astype(np.float64)
        observation, steps, ended = start, 0, False
        while not ended:
            action = int(actor(torch.from_numpy(observation)).argmax())
            observation, _, terminated, truncated, _ = env.step(action)
            ended, steps = terminated or truncated, steps + 1
        assert abs(steps - expected) <= 1  # the vectorised task starts from the unrounded state


class Odd(gym.Env):
    """Observations of two kinds, actions 5 and 6; pays 1 for the action it asks for."""

    observation_space = Dict({"asked": Discrete(2), "noise": Box(0, 1, (2, 3))})
    action_space = Discrete(2, start=5)

    def _observe(self):
        self.asked = int(self.np_random.integers(2))
        return {"asked": self.asked, "noise": self.np_random.random((2, 3), dtype=np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        assert action in (5, 6)
        reward = float(action == 5 + self.asked)
        return self._observe(), reward, False, False, {}


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_observations_are_flattened_and_actions_shifted(mode):
    # kills: FlattenObservation or the start of the action space left out; a vectorised version that is not flat used
    gym.register("Odd-v0", Odd, max_episode_steps=10, disable_env_checker=True, vector_entry_point="no.such:Task")
    try:
        envs = make_envs("Odd-v0", 4, autoreset_mode=mode)
        assert envs.single_observation_space.shape == (2 + 6,)
        assert (envs.single_action_space.n, envs.single_action_space.start) == (2, 0)
        asks = torch.nn.Linear(8, 2, bias=False)
        asks.weight.data = torch.eye(2, 8)  # the first two inputs are the one-hot of what is asked
        test_envs = make_envs("Odd-v0", 3)
        assert evaluate(test_envs, asks, greedy=True, seed=0).tolist() == [10, 10, 10]
        algorithm = PPO(envs, PPOConfig(total_steps=8_000, num_steps=50))
        list(algorithm.train())
        assert evaluate(test_envs, algorithm.actor, greedy=True, seed=0).mean() > 9.5
    finally:
        del gym.registry["Odd-v0"]


def test_an_episode_that_never_ends_is_an_error_that_says_what_to_do():
    actor = torch.nn.Linear(48, 4)
    torch.nn.init.zeros_(actor.weight)
    actor.bias.data = torch.tensor([1.0, 0.0, 0.0, 0.0])  # always up, against the wall
    with pytest.raises(ValueError, match="set max_episode_steps"):
        evaluate(make_envs("CliffWalking-v1", 1), actor, greedy=True, seed=0)
    assert evaluate(make_envs("CliffWalking-v1", 1, max_episode_steps=9), actor, greedy=True, seed=0) == [-9]


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([500, 500], 10),
        ([10, 475, 500], 20),
        ([500, 474, 475], 30),
        ([500, 10], None),
        ([], None),
        ([9, 500, 9, 500], 40),
    ],
)
def test_solved_means_reached_and_kept(returns, expected):
    # kills: the first time above the threshold; > for >=
    log = [{"step": 10 * i, "greedy_return": value} for i, value in enumerate(returns, start=1)]
    assert solved_at([{"step": 1}, *log], 475) == expected
