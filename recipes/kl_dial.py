"""Turn a trained policy back towards its reference, look at score and text on the way, and keep the scale you like.

A run that was trained with too little KL penalty scores high and reads badly. Its adapter scaled by a number between 0
(the reference) and 1 (the policy) gives every model in between, and one sweep over held-out prompts shows the best
score at each distance: no further training.

A run of gpt2_periods.py:    python recipes/kl_dial.py --policy runs/periods --output_dir runs/dial
A run of pipeline.py:        python recipes/kl_dial.py --policy runs/pipeline/ppo --reference runs/pipeline/sft \\
                                 --reward_model runs/pipeline/reward --output_dir runs/dial
Keep one as a plain model:   ... --export 0.5

Hardware and time:           packaged:smollm2 on 2 CPU cores: less than a minute per scale; docs/lab.md shows the
                             table.
Expect:                      score and KL rise with the scale, the score faster at first.
Change first:                --scales, then EVAL_PROMPTS below.
"""

from dataclasses import dataclass, field
from pathlib import Path

from trl import TrlParser

from rlhf_kit import PPOConfig, PPOTrainer, dial_table, dialed, plot_dial, sweep_dial, with_reference


# Config. Every field, and every field of PPOConfig, is a flag and a YAML key (--config file.yaml).
@dataclass
class RecipeArguments:
    policy: str = field(metadata={"help": "Folder of the trained adapter."})
    reference: str | None = field(
        default=None, metadata={"help": "Folder of the adapter that training started from. None = the bare base."}
    )
    reward_model: str | None = field(
        default=None, metadata={"help": "Reward model: hub name or folder. None = periods are counted."}
    )
    scales: list[float] = field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0], metadata={"help": "Where to look, 0 to 1."}
    )
    export: float | None = field(
        default=None, metadata={"help": "Scale to look at too, and to save as a plain model, merged."}
    )


DEFAULTS = {"output_dir": "runs/dial", "rollout_batch_size": 16, "mini_batch_size": 16, "max_completion_length": 24}


def count_periods(completions: list[str], **kwargs: object) -> list[float]:
    return [float(text.count(".")) for text in completions]


def main() -> None:
    parser = TrlParser((RecipeArguments, PPOConfig), allow_abbrev=False)  # a mistyped flag is an error
    parser.set_defaults(**DEFAULTS)
    recipe, args = parser.parse_args_and_config()

    # Build.
    trainer = PPOTrainer(
        model=with_reference(recipe.policy, recipe.reference),
        reward_funcs=recipe.reward_model or count_periods,
        args=args,
        eval_dataset=[{"prompt": prompt} for prompt in EVAL_PROMPTS],
    )

    # Sweep.
    exported = [] if recipe.export is None else [recipe.export]
    points = sweep_dial(trainer, sorted({*recipe.scales, *exported}))
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    plot_dial(points, folder / "dial.png")
    for point in points:
        print(f"scale {point.scale:.2f}: {EVAL_PROMPTS[0]!r} -> {point.completions[0]!r}")
    print(f"{dial_table(points)}\nFrontier: {folder / 'dial.png'}")
    if recipe.export is not None:
        with dialed(trainer.model, recipe.export):
            trainer.merge_and_save(folder / "merged")
        print(f"Scale {recipe.export:g}, merged: {folder / 'merged'}")


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
