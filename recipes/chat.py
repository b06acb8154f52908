"""Teach a chat model to answer in one short sentence: messages as prompts, a chat template, rewards that see messages.

A prompt is a list of messages, as TRL's datasets have it; the tokenizer's chat template turns it into tokens. A reward
function then gets each completion as [{"role": "assistant", "content": text}], so the reward functions of TRL's GRPO
work as they are: one of the two rewards below is `trl.rewards.get_repetition_penalty_reward`.

One process:          python recipes/chat.py
One per device:       accelerate launch recipes/chat.py
Without a hub:        python recipes/chat.py --model_name_or_path packaged:smollm2
Go on after a stop:   the same command with the same --output_dir and --resume_from_checkpoint last

Hardware and time:    packaged:smollm2 on 2 CPU cores and 24 GiB: about a minute per iteration.
Expect:               `eval_score` rises from -0.6 to 0.4, `eval_eos_rate` from 0.06 to nearly 0.9: short answers that
                      end by themselves, though not truer ones; docs/lab.md has the numbers.
Change first:         TARGET_WORDS, --missing_eos_penalty, --kl_coef.
"""

import time
from dataclasses import dataclass, field

from peft import LoraConfig
from trl import TrlParser
from trl.rewards import get_repetition_penalty_reward

from rlhf_kit import PPOConfig, PPOTrainer, run_summary

TARGET_WORDS = 12


# Config. Every field, and every field of PPOConfig, is a flag and a YAML key (--config file.yaml).
@dataclass
class RecipeArguments:
    model_name_or_path: str = field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        metadata={"help": "Any causal LM with a chat template: hub name, folder, or packaged:smollm2."},
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the LoRA adapters."})
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Go on from a checkpoint: its folder, or 'last' for the newest in output_dir."}
    )


DEFAULTS = {
    "output_dir": time.strftime("runs/chat-%Y%m%d-%H%M%S"),
    "rollout_batch_size": 32,
    "mini_batch_size": 8,
    "ppo_epochs": 2,
    "num_iterations": 12,
    "max_completion_length": 40,
    "missing_eos_penalty": 1.0,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "kl_coef": 0.2,
}


def brief(completions: list[list[dict[str, str]]], **kwargs: object) -> list[float]:
    """1 for TARGET_WORDS words, falling by 1 for that many words more or fewer."""
    words = [len(messages[0]["content"].split()) for messages in completions]
    return [max(-1.0, 1.0 - abs(count - TARGET_WORDS) / TARGET_WORDS) for count in words]


def chat(question: str) -> dict[str, list[dict[str, str]]]:
    return {"prompt": [{"role": "user", "content": question}]}


def main() -> None:
    parser = TrlParser((RecipeArguments, PPOConfig), allow_abbrev=False)  # a mistyped flag is an error
    parser.set_defaults(**DEFAULTS)
    recipe, args = parser.parse_args_and_config()

    # Build.
    trainer = PPOTrainer(
        model=recipe.model_name_or_path,
        reward_funcs=[brief, get_repetition_penalty_reward(ngram_size=3)],
        args=args,
        train_dataset=[chat(question) for question in TRAIN_QUESTIONS],
        eval_dataset=[chat(question) for question in EVAL_QUESTIONS],
        peft_config=LoraConfig(r=recipe.lora_r, lora_alpha=2 * recipe.lora_r, task_type="CAUSAL_LM"),
    )

    # Train.
    trainer.train(resume_from_checkpoint=recipe.resume_from_checkpoint)
    if trainer.accelerator.is_main_process:
        print(run_summary(args.output_dir))


TRAIN_QUESTIONS = [
    "Why is the sky blue?",
    "What does a librarian do?",
    "How do I keep bread fresh?",
    "Why do cats purr?",
    "What is the largest planet?",
    "How does a bicycle stay upright?",
    "What is a good breakfast?",
    "Why do leaves fall in autumn?",
    "How can I sleep better?",
    "What is a volcano?",
    "Who wrote Romeo and Juliet?",
    "Why is sea water salty?",
    "What does a compass show?",
    "How do bees make honey?",
    "What is the capital of France?",
    "How do I sharpen a knife?",
    "Why do we yawn?",
    "What is a democracy?",
    "How does soap work?",
    "What makes a good friend?",
    "Why do birds migrate?",
    "What is the speed of light?",
    "How do I remove a coffee stain?",
    "What is a solar eclipse?",
    "Why does ice float?",
    "How often should I water a cactus?",
    "What is a poem?",
    "How do magnets work?",
    "What is inflation?",
    "Why is exercise healthy?",
    "How do I learn a language?",
    "What is an atom?",
]

EVAL_QUESTIONS = [
    "Why do we dream?",
    "What is a rainbow?",
    "How do I boil an egg?",
    "What does a carpenter do?",
    "Why is the grass green?",
    "What is the longest river?",
    "How does a battery work?",
    "What is a good way to save money?",
    "Why do stars twinkle?",
    "How do I clean a window?",
    "What is a mammal?",
    "Why is sugar sweet?",
    "What causes thunder?",
    "How do fish breathe?",
    "What is a novel?",
    "Why should I drink water?",
]


if __name__ == "__main__":
    main()
