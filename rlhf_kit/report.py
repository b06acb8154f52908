"""A run told from its own log: what rose, what it cost, and the same prompts before and after."""

import json
import textwrap
import unicodedata
from pathlib import Path
from typing import Any

from rlhf_kit.callbacks import COMPLETIONS_FILE, LOG_FILE, read_jsonl
from rlhf_kit.metrics import OTHER_PROMPTS

WIDTH = 100  # columns of the text


def run_summary(output_dir: str | Path) -> str:
    """Plain-text summary of a run.

    Args:
        output_dir: of the run; it must hold its log.

    Returns:
        First against last numbers, completions of the evaluation prompts before and after, and where things are.

    Raises:
        FileNotFoundError: the folder holds no log.
    """
    folder = Path(output_dir)
    if not (folder / LOG_FILE).exists():
        raise FileNotFoundError(f"{folder} holds no {LOG_FILE}: is it the output_dir of a run that has logged?")
    log = read_jsonl(folder / LOG_FILE)
    train = [line for line in log if "score" in line]
    evaluations = [line for line in log if "eval_score" in line and OTHER_PROMPTS not in line]
    parts = []
    if train:
        parts.append(_comparison("Training prompts", train[0], train[-1], ""))
    if len(evaluations) > 1:
        parts.append(_comparison("Held-out prompts", evaluations[0], evaluations[-1], "eval_"))
    if (folder / COMPLETIONS_FILE).exists():
        parts.append(_before_and_after(read_jsonl(folder / COMPLETIONS_FILE)))
    parts.append(_places(folder))
    return "\n\n".join(part for part in parts if part)


def _comparison(title: str, first: dict[str, Any], last: dict[str, Any], prefix: str) -> str:
    rows = [
        ("score", "score", "{:.2f}"),
        ("reference KL, nats per token", "ref_kl", "{:.3f}"),
        ("entropy, nats per token", "entropy", "{:.2f}"),
        ("completion length, tokens", "completion_length", "{:.1f}"),
        ("ended by itself", "eos_rate", "{:.0%}"),
    ]
    head = f"{title:32} iteration {first['iteration']:>4}   iteration {last['iteration']:>4}"
    lines = [
        f"  {label:30} {_number(first[prefix + key], form):>14}   {_number(last[prefix + key], form):>14}"
        for label, key, form in rows
    ]
    return "\n".join([head, *lines])


def _before_and_after(rows: list[dict[str, Any]]) -> str:
    """Of each evaluation prompt its first and its last completion."""
    first: dict[str, dict[str, Any]] = {}
    last: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["split"] == "eval":
            key = json.dumps(row["prompt"])
            first.setdefault(key, row)
            last[key] = row
    lines = []
    for key, old in first.items():
        if last[key]["iteration"] == old["iteration"]:
            continue
        lines += ["", textwrap.fill(_text(old["prompt"]), WIDTH, initial_indent="  ", subsequent_indent="    ")]
        for name, row in (("before", old), ("after", last[key])):
            label = f"  {name:>8} {_number(row['score'], '{:6.2f}')} {_number(row['ref_kl'], '{:6.3f}')}  "
            text = _text(row["completion"]) or "(nothing)"
            lines.append(textwrap.fill(text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label)))
    title = "The same held-out prompts, before and after (score, reference KL in nats per token):"
    return "\n".join([title, *lines]) if lines else ""


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else form.format(value)


def _text(value: Any) -> str:
    """A prompt or completion on one printable line; of a chat, its last message."""
    text = value if isinstance(value, str) else value[-1]["content"]
    return "".join(c.encode("unicode_escape").decode() if _is_control(c) else c for c in text).strip()


def _is_control(character: str) -> bool:
    """Whether it would break a line or change the terminal; joiners inside emoji and words are neither."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\u200c\u200d"


def _places(folder: Path) -> str:
    what = {
        "model": "adapter_config.json" if (folder / "adapter_config.json").exists() else "config.json",
        "metrics": LOG_FILE,
        "completions": COMPLETIONS_FILE,
    }
    lines = [f"  {name:12} {folder / file}" for name, file in what.items() if (folder / file).exists()]
    return "\n".join(["Saved:", *lines])
