"""A 7B model on one 24 GB GPU: int8 base, LoRA, recomputed layers, and the memory said before anything is loaded.

The reward is the share of short words in a completion, times ten: the model learns to use plain words.

One GPU:              python recipes/eightbit_one_gpu.py
Four bits:            python recipes/eightbit_one_gpu.py --load_in_8bit false --load_in_4bit true
Another model:        python recipes/eightbit_one_gpu.py --model_name_or_path mistralai/Mistral-7B-Instruct-v0.3
Without a hub or GPU: python recipes/eightbit_one_gpu.py --model_name_or_path packaged:smollm2 --dtype auto
Go on after a stop:   the same command with the same --output_dir and --resume_from_checkpoint last

Hardware and time:    run as "without a hub or GPU" with --num_iterations 16 on 2 CPU cores and 24 GiB: about half a
                      minute per iteration; docs/scaling.md shows the output. The 7B default itself has not been
                      run: no GPU was at hand.
Expect:               `score` rises from 6 towards 8 in 16 iterations, at a reference KL of about 0.25 nats/token.
Change first:         --micro_batch_size (memory), --rollout_batch_size, --learning_rate, --kl_coef.
"""

import time
from dataclasses import dataclass, field

import torch
from peft import LoraConfig
from trl import TrlParser

from rlhf_kit import PPOConfig, PPOTrainer, estimate_memory, peak_memory, run_summary

GIB = 2**30


# Config. Every field, and every field of PPOConfig, is a flag and a YAML key (--config file.yaml).
@dataclass
class RecipeArguments:
    model_name_or_path: str = field(
        default="Qwen/Qwen2.5-7B-Instruct", metadata={"help": "Any causal LM: hub name, folder, or packaged:smollm2."}
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the LoRA adapters."})
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Go on from a checkpoint: its folder, or 'last' for the newest in output_dir."}
    )


DEFAULTS = {
    "output_dir": time.strftime("runs/eightbit-%Y%m%d-%H%M%S"),
    "load_in_8bit": True,
    "dtype": "bfloat16",
    "gradient_checkpointing": True,
    "rollout_batch_size": 32,
    "mini_batch_size": 8,
    "micro_batch_size": 4,
    "ppo_epochs": 2,
    "num_iterations": 40,
    "max_completion_length": 32,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
    "kl_coef": 0.1,
}


def short_words(completions: list[str], **kwargs: object) -> list[float]:
    words = [text.split() for text in completions]
    return [10 * sum(len(word) <= 4 for word in part) / max(len(part), 1) for part in words]


def main() -> None:
    parser = TrlParser((RecipeArguments, PPOConfig), allow_abbrev=False)  # a mistyped flag is an error
    parser.set_defaults(**DEFAULTS)
    recipe, args = parser.parse_args_and_config()
    adapters = LoraConfig(r=recipe.lora_r, lora_alpha=2 * recipe.lora_r, task_type="CAUSAL_LM")

    # Will it fit? Nothing is loaded for this.
    estimate = estimate_memory(recipe.model_name_or_path, args, adapters, prompt_length=16)
    print(f"Memory that {recipe.model_name_or_path} needs:\n{estimate.table()}", flush=True)
    room = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    if room is not None and estimate.peak() > room:
        print(f"Warning: {room / GIB:.1f} GiB are free on this GPU. Lower micro_batch_size, or use --load_in_4bit.")

    # Build.
    trainer = PPOTrainer(
        model=recipe.model_name_or_path,
        reward_funcs=short_words,
        args=args,
        train_dataset=[{"prompt": prompt} for prompt in TRAIN_PROMPTS],
        eval_dataset=[{"prompt": prompt} for prompt in EVAL_PROMPTS],
        peft_config=adapters,
    )

    # Train.
    trainer.train(resume_from_checkpoint=recipe.resume_from_checkpoint)
    if trainer.accelerator.is_main_process:
        print(run_summary(args.output_dir))
        print(f"Memory: {estimate.peak() / GIB:.2f} GiB estimated, {peak_memory() / GIB:.2f} GiB at most in use.")


TRAIN_PROMPTS = [
    "To bake bread you need",
    "The first thing to do in the morning is",
    "A bicycle works because",
    "The reason why the sky is blue is",
    "When a cat is hungry it",
    "If your computer is slow you should",
    "A good friend is someone who",
    "The best way to stay healthy is",
    "Plants need light because",
    "To cross the street safely you",
    "An umbrella is useful when",
    "A bank is a place where",
    "Before you paint a wall you",
    "The moon changes its shape because",
    "In winter many birds",
    "A doctor is a person who",
]

EVAL_PROMPTS = [
    "To plant a tree you",
    "A library is a place where",
    "Bread goes stale because",
    "When it rains for a long time",
    "A teacher is a person who",
    "The reason why ice floats is",
    "If you lose your keys you should",
    "Before a long trip you",
]


if __name__ == "__main__":
    main()
