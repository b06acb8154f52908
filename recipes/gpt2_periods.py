"""Teach a language model to write periods: the smallest complete PPO run.

The reward of a completion is the number of periods in it. With the KL penalty the model learns to write shorter
sentences; without it (--kl_coef 0) it ends up writing nothing but periods, which is what reward hacking looks like.

One process:          python recipes/gpt2_periods.py
One per device:       accelerate launch recipes/gpt2_periods.py
Without a hub:        python recipes/gpt2_periods.py --model_name_or_path packaged:smollm2
A preset:             python recipes/gpt2_periods.py --config recipes/configs/kl_in_loss.yaml
Another model:        python recipes/gpt2_periods.py --model_name_or_path Qwen/Qwen3-0.6B
Go on after a stop:   the same command with the same --output_dir and --resume_from_checkpoint last

Hardware and time:    packaged:smollm2 on 2 CPU cores and 24 GiB; README.md shows the output and the time of each step.
Expect:               `score` at least doubles while `reference KL` stays below 0.25 nats/token.
Change first:         --kl_coef, --learning_rate, --num_iterations; then `count_periods` below.
"""

import time
from dataclasses import dataclass, field

from peft import LoraConfig
from trl import TrlParser

from rlhf_kit import PPOConfig, PPOTrainer, run_summary


# Config. Every field, and every field of PPOConfig, is a flag and a YAML key (--config file.yaml).
@dataclass
class RecipeArguments:
    model_name_or_path: str = field(
        default="openai-community/gpt2",
        metadata={"help": "Any causal LM: hub name, local folder, or packaged:smollm2 (from PyPI, needs no hub)."},
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the LoRA adapters; 0 trains the whole model."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the LoRA adapters."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Layers to adapt. None = the query and value projections."}
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Go on from a checkpoint: its folder, or 'last' for the newest in output_dir."}
    )


DEFAULTS = {
    "output_dir": time.strftime("runs/periods-%Y%m%d-%H%M%S"),
    "rollout_batch_size": 32,
    "mini_batch_size": 8,
    "ppo_epochs": 2,
    "num_iterations": 10,
    "max_completion_length": 24,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "kl_coef": 0.3,
}


def count_periods(completions: list[str], **kwargs: object) -> list[float]:
    return [float(text.count(".")) for text in completions]


def main() -> None:
    parser = TrlParser((RecipeArguments, PPOConfig), allow_abbrev=False)  # a mistyped flag is an error
    parser.set_defaults(**DEFAULTS)
    recipe, args = parser.parse_args_and_config()

    # Build.
    adapters = LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        target_modules=recipe.lora_target_modules,
        task_type="CAUSAL_LM",
    )
    trainer = PPOTrainer(
        model=recipe.model_name_or_path,
        reward_funcs=count_periods,
        args=args,
        train_dataset=[{"prompt": prompt} for prompt in TRAIN_PROMPTS],
        eval_dataset=[{"prompt": prompt} for prompt in EVAL_PROMPTS],
        peft_config=adapters if recipe.lora_r else None,
    )

    # Train.
    trainer.train(resume_from_checkpoint=recipe.resume_from_checkpoint)
    if trainer.accelerator.is_main_process:
        print(run_summary(args.output_dir))


TRAIN_PROMPTS = [
    "The weather this morning was",
    "My grandmother always told me that",
    "On the way to the station",
    "The old lighthouse keeper",
    "Nobody in the village knew why",
    "After a long day at work",
    "The best way to learn a language is",
    "When the train finally arrived",
    "In the corner of the library",
    "She opened the letter and",
    "The museum on the hill",
    "Every summer we drive to",
    "The recipe calls for",
    "A small boat drifted across",
    "Scientists have recently found that",
    "The city council decided to",
    "During the winter months",
    "He had never seen such a",
    "The children ran into the garden and",
    "It took three years to build",
    "The mountain path was steep, so",
    "My first job was at",
    "The radio in the kitchen played",
    "Before the concert started",
    "The new bridge connects",
    "Our neighbours have a dog that",
    "The company announced that it",
    "Late in the evening the phone rang and",
    "There is a bakery near the river where",
    "The teacher wrote on the board that",
    "If you travel north from here",
    "The painting shows a woman who",
    "Most people do not realise that",
    "The team lost the match because",
    "At the end of the corridor",
    "An engineer from the coast",
    "The moon was bright and",
    "Students who study in groups",
    "The storm knocked down",
    "He picked up the guitar and",
    "The market opens at dawn, and",
    "Long before the war",
    "The doctor looked at the chart and",
    "We planted tomatoes in",
    "The last page of the book",
    "A stranger sat down next to",
    "The river rises every spring, which",
    "Her plan was simple:",
]

EVAL_PROMPTS = [
    "The captain of the ship",
    "Last weekend my brother and I",
    "The restaurant by the harbour",
    "One thing I learned at school is that",
    "The old clock in the hall",
    "People who live in the desert",
    "The film begins with",
    "Early in the morning, the farmer",
    "The letter from the bank said",
    "In a small town by the sea",
    "The new student was",
    "When the lights went out",
    "A good cup of coffee",
    "The bus was late, and",
    "My uncle used to work as",
    "The garden behind the house",
]


if __name__ == "__main__":
    main()
