"""All of RLHF on one base: demonstrations, a reward model from ranked texts, then PPO against it.

    1. sft      TRL's SFTTrainer      an adapter that imitates demonstrations
    2. reward   TRL's RewardTrainer   an adapter and a score head that tell the better of two texts
    3. ppo      PPOTrainer            the first, trained on against the second, held to a frozen copy of the first

Each stage keeps its result in a folder of its own under --output_dir. The same command again skips the stages that are
done and goes on with the one that is not.

Real data without a hub: the source distribution of vaderSentiment carries 10,605 snippets of film reviews, each graded
by 20 people or more from -4 to 4. The demonstrations are snippets; the pairs are two snippets whose grades differ by
1.5 or more, so that "better" means "more positive"; the prompts are the first four tokens of a snippet.

    pip download vaderSentiment==3.3.2 --no-deps --no-binary :all: -d data
    python recipes/pipeline.py --config recipes/configs/pipeline.yaml

Your own preferences: --preferences trl-lib/ultrafeedback_binarized, or a .json file: rows with "prompt", "chosen" and
                      "rejected", text or messages
One per device:       accelerate launch recipes/pipeline.py --config recipes/configs/pipeline.yaml
Go on after a stop:   the same command with the same --output_dir

Hardware and time:    the command above on 2 CPU cores and 24 GiB; README.md shows the time and the table.
Expect:               a reward model that is right on more than 0.7 of held-out pairs, and PPO ahead of SFT by many
                      standard errors.
Change first:         --kl_coef, --num_iterations, --reward_pairs; then --critic adapter.
"""

import gc
import hashlib
import io
import json
import math
import random
import tarfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer, TrlParser, extract_prompt

from rlhf_kit import PPOConfig, PPOTrainer, bytes_by_role, live_tensor_bytes, resolve_model

MIB = 2**20


# Config. Every field, and every field of PPOConfig, is a flag and a YAML key (--config file.yaml).
@dataclass
class PipelineArguments:
    model_name_or_path: str = field(
        default="HuggingFaceTB/SmolLM2-135M",
        metadata={"help": "Any causal LM: hub name, folder, or packaged:smollm2."},
    )
    snippets: str | None = field(default=None, metadata={"help": "vaderSentiment's source distribution (.tar.gz)."})
    preferences: str | None = field(default=None, metadata={"help": "Preference dataset: hub name or .json file."})
    lora_r: int = field(default=16, metadata={"help": "Rank of all adapters."})
    sft_examples: int = field(default=2000, metadata={"help": "Demonstrations to imitate."})
    sft_learning_rate: float = field(default=5e-4, metadata={"help": "Peak learning rate of the first stage."})
    reward_pairs: int = field(default=1500, metadata={"help": "Pairs to train the reward model on."})
    reward_learning_rate: float = field(default=5e-4, metadata={"help": "Peak learning rate of the second stage."})
    batch_size: int = field(default=8, metadata={"help": "Texts, or pairs, per step of the first two stages."})
    test_pairs: int = field(default=400, metadata={"help": "Held-out pairs to test the reward model on."})
    test_prompts: int = field(default=128, metadata={"help": "Held-out prompts to compare SFT and PPO on."})
    max_length: int = field(default=128, metadata={"help": "Tokens of a text at most in the first two stages."})


STAGE_SETTINGS = {
    "sft": ("model_name_or_path", "snippets", "preferences", "lora_r", "sft_examples", "sft_learning_rate",
            "batch_size", "max_length"),
    "reward": ("model_name_or_path", "snippets", "preferences", "lora_r", "reward_pairs", "reward_learning_rate",
               "batch_size", "test_pairs", "max_length"),
}  # fmt: skip

DEFAULTS = {
    "output_dir": "runs/pipeline",
    "rollout_batch_size": 32,
    "mini_batch_size": 8,
    "ppo_epochs": 2,
    "num_iterations": 16,
    "max_completion_length": 24,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
    "kl_coef": 0.2,
    "save_every": 4,
}


# Data.


@dataclass
class Data:
    demonstrations: list[dict[str, Any]]
    train_pairs: list[dict[str, Any]]
    test_pairs: list[dict[str, Any]]
    train_prompts: list[dict[str, Any]]
    test_prompts: list[dict[str, Any]]

    def check(self) -> None:
        """Print how much there is. Too little would only show hours from now.

        Raises:
            SystemExit: a part has too few rows.
        """
        counts = {name.replace("_", " "): len(rows) for name, rows in vars(self).items()}
        print("Data:", ", ".join(f"{count:,} {name}" for name, count in counts.items()), flush=True)
        short = [name for name, count in counts.items() if count < 2]
        if short:
            raise SystemExit(f"too few {', '.join(short)}: two of each at least; a fifth of all data is held out.")


def is_held_out(text: str) -> bool:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5 == 0


def graded_snippets(path: str) -> list[tuple[float, str]]:
    """(mean grade, text) of each snippet in the source distribution."""
    with tarfile.open(path) as outer:
        name = next(name for name in outer.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz"))
        inner = outer.extractfile(name)
        assert inner is not None
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as archive:
            name = next(n for n in archive.getnames() if n.endswith("movieReviewSnippets_GroundTruth.txt"))
            file = archive.extractfile(name)
            assert file is not None
            rows = [line.split("\t") for line in file.read().decode("utf-8", errors="replace").splitlines()]
    return [(float(grade), text.strip()) for _, grade, text in rows]


def pairs_of(snippets: list[tuple[float, str]], count: int) -> list[dict[str, str]]:
    """Two snippets whose grades differ by 1.5 or more, the better one first."""
    rng, pairs = random.Random(0), []
    while len(pairs) < count:
        low, high = sorted(rng.sample(snippets, 2))
        if high[0] - low[0] >= 1.5:
            pairs.append({"chosen": high[1], "rejected": low[1]})
    return pairs


def from_snippets(recipe: PipelineArguments) -> Data:
    snippets = graded_snippets(str(recipe.snippets))
    random.Random(0).shuffle(snippets)
    train = [s for s in snippets if not is_held_out(s[1])]
    test = [s for s in snippets if is_held_out(s[1])]
    return Data(
        demonstrations=[{"text": text} for _, text in train[: recipe.sft_examples]],
        train_pairs=pairs_of(train, recipe.reward_pairs),
        test_pairs=pairs_of(test, recipe.test_pairs),
        train_prompts=[{"text": text} for _, text in train],
        test_prompts=[{"text": text} for _, text in test[: recipe.test_prompts]],
    )


def from_preferences(recipe: PipelineArguments) -> Data:
    name = str(recipe.preferences)
    rows = load_dataset("json", data_files=name) if Path(name).exists() else load_dataset(name)
    missing = {"chosen", "rejected"} - set(rows["train"].column_names)
    if missing:
        raise SystemExit(
            f"{name} has no column {' and no '.join(sorted(missing))}, only {', '.join(rows['train'].column_names)}."
        )
    pairs = [dict(row) if "prompt" in row else extract_prompt(row) for row in rows["train"].shuffle(seed=0)]
    train = [pair for pair in pairs if not is_held_out(json.dumps(pair["prompt"]))]
    test = [pair for pair in pairs if is_held_out(json.dumps(pair["prompt"]))]
    columns = ("prompt", "chosen", "rejected")
    return Data(
        demonstrations=[{"prompt": p["prompt"], "completion": p["chosen"]} for p in train[: recipe.sft_examples]],
        train_pairs=[{key: p[key] for key in columns} for p in train[: recipe.reward_pairs]],
        test_pairs=[{key: p[key] for key in columns} for p in test[: recipe.test_pairs]],
        train_prompts=[{"prompt": p["prompt"]} for p in train],
        test_prompts=[{"prompt": p["prompt"]} for p in test[: recipe.test_prompts]],
    )


# The stages.


def stage(name: str, recipe: PipelineArguments, folder: Path, run: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run a stage, or take its result from the folder if it was run with the same settings."""
    settings = {key: value for key, value in asdict(recipe).items() if key in STAGE_SETTINGS[name]}
    record = folder / "stage.json"
    if record.exists():
        done = json.loads(record.read_text())
        differences = [f"{k}: {done['settings'].get(k)!r} there, {v!r} now" for k, v in settings.items()
                       if done["settings"].get(k) != v]  # fmt: skip
        if differences:
            raise ValueError(
                f"{folder} was made with other settings ({'; '.join(differences)}): use another --output_dir."
            )
        print(f"Stage {name}: done already, in {folder}.")
        return done["result"]
    print(f"Stage {name}: starts.", flush=True)
    start = time.perf_counter()
    result = run() | {"seconds": time.perf_counter() - start}
    gc.collect()  # the base goes before the next stage loads its own
    if PartialState().is_main_process:
        write_whole(record, {"settings": settings, "result": result})
    PartialState().wait_for_everyone()
    return result


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write JSON under another name first: a kill leaves the file whole or absent."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)


def common(recipe: PipelineArguments, folder: Path, learning_rate: float) -> dict[str, Any]:
    """Settings that TRL's two trainers share."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": recipe.batch_size,
        "per_device_eval_batch_size": recipe.batch_size,
        "learning_rate": learning_rate,
        "num_train_epochs": 1,
        "max_length": recipe.max_length,
        "logging_steps": 20,
        "save_strategy": "no",
        "report_to": [],
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
    }


def train_sft(recipe: PipelineArguments, data: Data, folder: Path) -> dict[str, float]:
    model = resolve_model(recipe.model_name_or_path)
    trainer = SFTTrainer(
        model,
        SFTConfig(**common(recipe, folder, recipe.sft_learning_rate)),
        train_dataset=Dataset.from_list(data.demonstrations),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=recipe.lora_r, lora_alpha=2 * recipe.lora_r, task_type="CAUSAL_LM"),
    )
    loss = trainer.train().training_loss
    trainer.save_model()
    return {"loss": loss}


def train_reward_model(recipe: PipelineArguments, data: Data, folder: Path) -> dict[str, float]:
    model = resolve_model(recipe.model_name_or_path)
    trainer = RewardTrainer(
        model,
        RewardConfig(**common(recipe, folder, recipe.reward_learning_rate)),
        train_dataset=Dataset.from_list(data.train_pairs),
        eval_dataset=Dataset.from_list(data.test_pairs),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=recipe.lora_r, lora_alpha=2 * recipe.lora_r, task_type="SEQ_CLS"),
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    return {"accuracy": accuracy}


def train_ppo(args: PPOConfig, data: Data, sft: Path, reward: Path) -> PPOTrainer:
    folder = Path(args.output_dir)
    if (folder / "log.jsonl").exists() and not any(folder.glob("checkpoint-*")) and PartialState().is_main_process:
        folder.rename(folder.with_name(f"ppo-stopped-{time.strftime('%H%M%S')}"))  # before its first checkpoint
    PartialState().wait_for_everyone()
    # Build. The policy is the SFT adapter; the reference is a frozen copy of it, and the reward a third adapter.
    trainer = PPOTrainer(
        model=str(sft),
        reward_funcs=str(reward),
        args=args,
        train_dataset=data.train_prompts,
        eval_dataset=data.test_prompts,
    )
    # Train.
    done = trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))["iteration"]
    if done < args.num_iterations:
        raise SystemExit("Stage ppo was stopped; the same command goes on with it.")
    return trainer


# The table.


def evaluations(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Held-out completions of the first and of the last evaluation: those of SFT and those of PPO."""
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["split"] == "eval"]
    last = max(row["iteration"] for row in rows)
    return [row for row in rows if row["iteration"] == 0], [row for row in rows if row["iteration"] == last]


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


@torch.no_grad()
def perplexity(trainer: PPOTrainer, rows: list[dict[str, Any]]) -> float:
    """Of completions, per token, under the base with all adapters switched off."""
    nll, count = 0.0, 0
    network = trainer.model.pretrained_model
    with network.disable_adapter():
        for prompt, row in zip(trainer.eval_prompts.prompt_ids, rows, strict=True):
            completion = trainer.processing_class(text_of(row["completion"]), add_special_tokens=False)["input_ids"]
            ids = torch.tensor([prompt + completion], device=trainer.model.device)
            logprobs = network(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            nll -= float(logprobs.gather(-1, ids[0, len(prompt) :, None]).sum())
            count += len(completion)
    return math.exp(nll / max(count, 1))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def results(trainer: PPOTrainer, stages: dict[str, dict[str, float]]) -> dict[str, Any]:
    before, after = evaluations(Path(trainer.args.output_dir))
    gains = [new["score"] - old["score"] for old, new in zip(before, after, strict=True)]
    last = [line for line in trainer.state.log_history if "eval_ref_kl" in line][-1]
    return {
        "accuracy": stages["reward"]["accuracy"],
        "sft_score": mean_and_error([row["score"] for row in before]),
        "ppo_score": mean_and_error([row["score"] for row in after]),
        "gain": mean_and_error(gains),
        "win_rate": sum((gain > 0) + 0.5 * (gain == 0) for gain in gains) / len(gains),
        "ref_kl": last["eval_ref_kl"],
        "ref_kl_per_completion": last["eval_ref_kl_per_completion"],
        "sft_perplexity": perplexity(trainer, before),
        "ppo_perplexity": perplexity(trainer, after),
        "bytes": bytes_by_role(trainer),
        "live_bytes": live_tensor_bytes(),
        "seconds": {name: stage["seconds"] for name, stage in stages.items()},
    }


def table(r: dict[str, Any], pairs: int, prompts: int) -> str:
    size = {role: f"{count / MIB:,.1f} MiB" for role, count in r["bytes"].items()}
    one = sum(r["bytes"].values())
    minutes = ", ".join(f"{s / 60:.1f}" for s in r["seconds"].values())
    rows = [
        (f"reward model right on {pairs} held-out pairs", f"{r['accuracy']:.3f}"),
        (f"score of SFT on {prompts} held-out prompts", "{:.2f} +- {:.2f}".format(*r["sft_score"])),
        ("score of PPO on the same prompts", "{:.2f} +- {:.2f}".format(*r["ppo_score"])),
        ("gain of PPO over SFT", "{:.2f} +- {:.2f}".format(*r["gain"])),
        ("PPO wins against SFT", f"{r['win_rate']:.2f}"),
        ("KL to SFT, nats per token / completion", f"{r['ref_kl']:.3f} / {r['ref_kl_per_completion']:.2f}"),
        ("perplexity under the base, SFT / PPO", f"{r['sft_perplexity']:.1f} / {r['ppo_perplexity']:.1f}"),
        ("weights: base, held once", size["base"]),
        ("weights: policy", size["policy"]),
        ("weights: reference", size["reference"]),
        ("weights: critic", size["critic"]),
        ("weights: reward model", size["reward"]),
        ("weights: all four on one base", f"{one / MIB:,.0f} MiB"),
        ("weights: four separate models", f"{4 * r['bytes']['base'] / MIB:,.0f} MiB"),
        ("all tensors alive, Adam's included", f"{r['live_bytes'] / MIB:,.0f} MiB"),
        ("minutes: SFT, reward model, PPO", minutes + " since it went on" * r["ppo_resumed"]),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> None:
    parser = TrlParser((PipelineArguments, PPOConfig), allow_abbrev=False)  # a mistyped flag is an error
    parser.set_defaults(**DEFAULTS)
    recipe, args = parser.parse_args_and_config()
    if (recipe.snippets is None) == (recipe.preferences is None):
        raise SystemExit("pass one of --snippets and --preferences: see the head of this file.")
    for name, value in vars(recipe).items():
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise SystemExit(f"{name} must be above 0, got {value}.")
    if args.log_completions == 0:
        raise SystemExit("log_completions=0 leaves nothing to compare SFT and PPO by: set it to 1 or more.")
    if recipe.snippets and not Path(recipe.snippets).is_file():
        raise SystemExit(f"{recipe.snippets} is not there: the head of this file has the command that fetches it.")
    root = Path(args.output_dir)
    args.output_dir = str(root / "ppo")
    if recipe.snippets:
        args.text_prompt_length = args.text_prompt_length or 4
    data = from_snippets(recipe) if recipe.snippets else from_preferences(recipe)
    data.check()

    sft, reward = root / "sft", root / "reward"
    stages = {
        "sft": stage("sft", recipe, sft, lambda: train_sft(recipe, data, sft)),
        "reward": stage("reward", recipe, reward, lambda: train_reward_model(recipe, data, reward)),
    }
    print("Stage ppo: starts.", flush=True)
    start, resumed = time.perf_counter(), any(Path(args.output_dir).glob("checkpoint-*"))
    trainer = train_ppo(args, data, sft, reward)
    stages["ppo"] = {"seconds": time.perf_counter() - start}
    if trainer.accelerator.is_main_process:
        found = results(trainer, stages) | {"ppo_resumed": resumed}
        write_whole(root / "pipeline.json", found)
        print(table(found, len(data.test_pairs), len(data.test_prompts)))


if __name__ == "__main__":
    main()
