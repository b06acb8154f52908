"""A language small enough to learn in a minute, so that an experiment with many seeds takes minutes on two cores.

A grammar writes little stories of one to four sentences ("the old man walked to the river . he was happy ."). A
two-layer GPT-2 with a word per token learns it once, and every experiment of this folder starts from that model. What
the model is taught then is as real as with a large one: rollouts, rewards, a reference, PPO. What it writes can be
checked against the grammar, which gives a true score of "still speaks the language" that no real text has.

Not a recipe: the other files of this folder use it.
"""

import argparse
import contextlib
import io
import json
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from rlhf_kit import PPOConfig, PPOTrainer

ROOT = Path("runs/lab")
WIDTH, LENGTH, STEPS, BATCH = 64, 32, 1000, 64

PEOPLE = ["man", "woman", "boy", "girl", "farmer", "sailor", "teacher", "baker"]
AGES = ["old", "young", "tall", "small"]
PLACES = ["river", "market", "forest", "school", "harbour", "garden"]
WENT = ["walked", "ran", "went", "drove"]
GOOD = ["happy", "kind", "glad", "proud", "calm"]
BAD = ["sad", "tired", "angry", "cold", "lost"]
THINGS = ["bread", "fish", "books", "flowers", "bread", "tools"]
DID = ["bought", "sold", "found", "lost"]
WORDS = sorted(
    {"the", "a", "he", "she", "was", "to", "and", ".", *PEOPLE, *AGES, *PLACES, *WENT, *GOOD, *BAD, *THINGS, *DID}
)

disable_progress_bar()
Reward = Callable[..., list[float]]


def sentence(rng: random.Random, subject: str) -> str:
    kind = rng.random()
    if kind < 0.4:
        return f"{subject} {rng.choice(WENT)} to the {rng.choice(PLACES)} ."
    if kind < 0.7:
        return f"{subject} was {rng.choice(GOOD if rng.random() < 0.3 else BAD)} ."
    return f"{subject} {rng.choice(DID)} {rng.choice(THINGS)} and {rng.choice(DID)} {rng.choice(THINGS)} ."


def opening(rng: random.Random) -> str:
    return f"{rng.choice(['the', 'a'])} {rng.choice(AGES)} {rng.choice(PEOPLE)}"


def story(rng: random.Random) -> str:
    first = opening(rng)
    pronoun = "she" if first.split()[-1] in ("woman", "girl", "teacher", "baker") else "he"
    return " ".join([sentence(rng, first), *(sentence(rng, pronoun) for _ in range(rng.randrange(4)))])


def is_sentence(words: list[str]) -> bool:
    """Whether the grammar could have written this, without its full stop."""
    rest = words[3:] if words[:1] in (["the"], ["a"]) else words[1:]
    known = words[:1] in (["he"], ["she"]) or (len(words) > 3 and words[1] in AGES and words[2] in PEOPLE)
    if not known or not rest:
        return False
    if rest[0] in WENT:
        return rest[1:3] == ["to", "the"] and len(rest) == 4 and rest[3] in PLACES
    if rest[0] == "was":
        return len(rest) == 2 and rest[1] in [*GOOD, *BAD]
    return (
        len(rest) == 5 and rest[0] in DID and rest[1] in THINGS and rest[2] == "and" and rest[3] in DID
        and rest[4] in THINGS
    )  # fmt: skip


def sentences(prompt: str, completion: str) -> list[list[str]]:
    """Of prompt and completion together, each without its full stop; the last only if it has one."""
    parts = f"{prompt} {completion}".split(".")
    return [part.split() for part in parts[:-1]]


def grammatical(prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
    """Share of sentences that the grammar could have written."""
    found = [sentences(p, c) for p, c in zip(prompts, completions, strict=True)]
    return [sum(map(is_sentence, parts)) / max(len(parts), 1) for parts in found]


def periods(completions: list[str], **kwargs: object) -> list[float]:
    return [float(text.count(".")) for text in completions]


def ends_well(completions: list[str], **kwargs: object) -> list[float]:
    """1 if the story stops by itself on a good word: one number, known only at the very end."""
    return [float(len(w := text.split()) > 1 and w[-1] == "." and w[-2] in GOOD) for text in completions]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<end>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def story_model() -> str:
    """Folder of the model that writes stories; trained on the first call, about a minute."""
    folder = ROOT / "model"
    if (folder / "model.safetensors").exists():
        return str(folder)
    print("Training the model that writes stories, once.", flush=True)
    torch.manual_seed(0)
    rng, tokenizer = random.Random(0), make_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=0,
                        eos_token_id=0, pad_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        rows = [tokenizer(story(rng))["input_ids"] + [0] for _ in range(BATCH)]
        ids = torch.full((BATCH, LENGTH), -100)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row[:LENGTH])
        loss = model(input_ids=ids.clamp(min=0), attention_mask=ids.ge(0).long(), labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_trainer(rewards: Reward | list[Reward], folder: str, *, seed: int = 0, **settings: Any) -> PPOTrainer:
    """A trainer on the tiny language, with the settings that the experiments share."""
    shared = {
        "output_dir": folder,
        "seed": seed,
        "rollout_batch_size": 64,
        "mini_batch_size": 16,
        "micro_batch_size": 64,
        "ppo_epochs": 4,
        "num_iterations": 40,
        "max_completion_length": 16,
        "learning_rate": 3e-3,
        "value_learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "kl_coef": 0.05,
        "save_every": None,
        "log_completions": 0,
    }
    rng = random.Random(1)
    model = AutoModelForCausalLM.from_pretrained(story_model())
    return PPOTrainer(
        model,
        rewards,
        PPOConfig(**{**shared, **settings}),
        [{"prompt": opening(rng)} for _ in range(256)],
        eval_dataset=[{"prompt": opening(rng)} for _ in range(128)],
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )


def arguments(*, seeds: int, iterations: int) -> argparse.Namespace:
    """--seeds and --iterations, for a quicker or a longer look."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=seeds, help="runs per setting")
    parser.add_argument("--iterations", type=int, default=iterations, help="iterations per run")
    return parser.parse_args()


def train(
    rewards: Reward | list[Reward], *, seed: int = 0, **settings: Any
) -> tuple[list[dict[str, Any]], PPOTrainer]:
    """The log of one run, training and evaluation lines, and its trainer."""
    story_model()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(rewards, f"{folder}/run", seed=seed, **settings)
        trainer.train()
    return trainer.state.log_history, trainer


def curve(log: list[dict[str, Any]], key: str) -> list[float]:
    return [line[key] for line in log if key in line and "eval_score" not in line]


def last(log: list[dict[str, Any]], key: str, count: int = 5) -> float:
    """Mean over the last iterations."""
    return statistics.mean(curve(log, key)[-count:])


def spread(values: list[float]) -> str:
    """Median and range over seeds."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def draw(axes: Any, logs: list[list[dict[str, Any]]], key: str, label: str, color: str) -> None:
    """Every seed thin, their median thick."""
    curves = [curve(log, key) for log in logs]
    steps = range(1, 1 + min(map(len, curves)))
    for values in curves:
        axes.plot(steps, values[: len(steps)], color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps, [statistics.median(v[i] for v in curves) for i in range(len(steps))], color=color, label=label)


def figure(*titles: str) -> tuple[Figure, list[Any]]:
    """One panel per title, side by side."""
    picture = Figure(figsize=(4.2 * len(titles), 3.4), layout="constrained")
    panels = list(picture.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
    return picture, panels


def save(name: str, picture: Figure, rows: list[list[str]], results: dict[str, Any]) -> None:
    """Write runs/lab/<name>.png and .json, and print the table."""
    for axes in picture.axes:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    ROOT.mkdir(parents=True, exist_ok=True)
    picture.savefig(ROOT / f"{name}.png", dpi=110)
    (ROOT / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]))
    print(f"Curves: {ROOT / f'{name}.png'}")
