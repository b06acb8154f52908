"""The whole pipeline on a tiny base: three stages, gone on with stage by stage, and the table at the end."""

import io
import json
import random
import re
import shutil
import tarfile
from pathlib import Path

import pytest
from conftest import make_model, make_tokenizer
from fresh import run_fresh

PIPELINE = Path(__file__).parents[1] / "recipes" / "pipeline.py"
GOOD, BAD = ["lovely", "great", "warm"], ["dull", "bad", "cold"]
SMALL = [
    "--sft_examples", "24", "--reward_pairs", "64", "--test_pairs", "32", "--test_prompts", "8",
    "--num_iterations", "2", "--rollout_batch_size", "8", "--mini_batch_size", "4", "--max_completion_length", "6",
    "--lora_r", "4", "--reward_learning_rate", "1e-2", "--save_every", "1",
]  # fmt: skip

pytestmark = pytest.mark.slow


def add(archive, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny base, graded texts packed as the source distribution packs them, and the same as preferences."""
    folder = tmp_path_factory.mktemp("pipeline")
    make_model("llama").save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    rng = random.Random(0)
    graded = [(3.0, f"film {i} is {rng.choice(GOOD)}") for i in range(60)]
    graded += [(-3.0, f"film {i} is {rng.choice(BAD)}") for i in range(60, 120)]
    lines = "\n".join(f"{i}\t{grade}\t{text}" for i, (grade, text) in enumerate(graded)).encode()
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        add(archive, "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt", lines)
    with tarfile.open(folder / "snippets.tar.gz", "w:gz") as archive:
        add(archive, "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())
    pairs = [
        {"prompt": f"film {i} is", "chosen": f" {rng.choice(GOOD)}", "rejected": f" {rng.choice(BAD)}"}
        for i in range(160)
    ]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    return folder


def run(folder, *arguments, out="run"):
    base = ["--model_name_or_path", folder / "base", "--output_dir", folder / out, *SMALL]
    return run_fresh(PIPELINE, *base, *arguments, env={"ACCELERATE_USE_CPU": "true"}, timeout=600)


def test_three_stages_run_and_go_on_where_they_stopped(folder):
    # kills: a stage run again that was done, another model's results taken, PPO started afresh, a base held twice
    data = ("--snippets", str(folder / "snippets.tar.gz"))
    first = run(folder, *data)
    assert first.returncode == 0, first.stderr[-3000:]
    found = json.loads((folder / "run/pipeline.json").read_text())
    assert found["accuracy"] > 0.6
    assert found["bytes"]["policy"] == found["bytes"]["reference"] > 0
    assert found["bytes"]["reward"] == found["bytes"]["policy"] + 4 * 32
    assert found["live_bytes"] < 1.7 * found["bytes"]["base"]
    assert f"| reward model right on 32 held-out pairs | {found['accuracy']:.3f} |" in first.stdout
    assert "SFT on 8 held-out prompts" in first.stdout
    assert "24 demonstrations, 64 train pairs, 32 test pairs, " in first.stdout
    assert "since it went on" not in first.stdout
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*.safetensors")}

    again = run(folder, *data, "--num_iterations", "3")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "Stage sft: done already" in again.stdout
    assert "Stage reward: done already" in again.stdout
    assert "2 of 3 iterations done" in again.stdout
    assert "since it went on |" in again.stdout
    now = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*.safetensors")}
    assert all(now[path] == time for path, time in before.items() if "/ppo/" not in str(path))

    for checkpoint in (folder / "run/ppo").glob("checkpoint-*"):  # as if stopped before the first was written
        shutil.rmtree(checkpoint)
    afresh = run(folder, *data)
    assert afresh.returncode == 0, afresh.stderr[-3000:]
    (aside,) = (folder / "run").glob("ppo-stopped-*")
    assert (aside / "log.jsonl").exists()

    other = run(folder, *data, "--reward_pairs", "32")
    assert other.returncode != 0
    assert "made with other settings (reward_pairs: 64 there, 32 now)" in other.stderr


def test_preferences_of_your_own(folder):
    # kills: prompts lost from the pairs, SFT on the rejected text
    done = run(folder, "--preferences", str(folder / "pairs.json"), out="own")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((folder / "own/pipeline.json").read_text())["accuracy"] > 0.6


WRONG = {
    "no source": ((), "pass one of --snippets and --preferences"),
    "two sources": (("--snippets", "a", "--preferences", "b"), "pass one of --snippets and --preferences"),
    "no file": (("--snippets", "nowhere.tar.gz"), "nowhere.tar.gz is not there"),
    "no completions": (("--snippets", "{}/snippets.tar.gz", "--log_completions", "0"), "log_completions=0"),
    "no pairs": (("--snippets", "a", "--reward_pairs", "-1"), "reward_pairs must be above 0, got -1"),
    "no rate": (("--snippets", "a", "--sft_learning_rate", "nan"), "sft_learning_rate must be above 0, got nan"),
    "one prompt": (("--snippets", "{}/snippets.tar.gz", "--test_prompts", "1"), "too few test prompts"),
    "few rows": (("--preferences", "{}/few.json"), "too few .*test pairs"),
    "a column": (("--preferences", "{}/columns.json"), "has no column rejected, only prompt, chosen"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_would_fail_late_is_said_first(wrong, folder):
    # kills: a traceback, one of two sources silently ignored, an error after the first two stages
    pairs = json.loads((folder / "pairs.json").read_text())
    (folder / "few.json").write_text(json.dumps(pairs[:1]))
    (folder / "columns.json").write_text(json.dumps([{k: p[k] for k in ("prompt", "chosen")} for p in pairs]))
    arguments, message = WRONG[wrong]
    done = run(folder, *(part.format(folder) for part in arguments), out="none")
    assert done.returncode == 1
    assert re.search(message, done.stderr)
    assert "Traceback" not in done.stderr
    assert not (folder / "none").exists()
