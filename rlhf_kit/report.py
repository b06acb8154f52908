"""A run told from its own log: what rose, what it cost, and the same prompts before and after."""

import json
import textwrap
from pathlib import Path
from typing import Any

from rlhf_kit.callbacks import COMPLETIONS_FILE, LOG_FILE

WIDTH = 100  # columns of the text


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


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
    evaluations = [line for line in log if "eval_score" in line]
    parts = []
    if train:
        parts.append(_comparison("Training prompts", train[0], train[-1], ""))
    if len(evaluations) > 1:
        parts.append(_comparison("Held-out prompts", evaluations[0], evaluations[-1], "eval_"))
        parts.append(_before_and_after(folder, evaluations[0]["iteration"], evaluations[-1]["iteration"]))
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
        f"  {label:30} {form.format(first[prefix + key]):>14}   {form.format(last[prefix + key]):>14}"
        for label, key, form in rows
    ]
    return "\n".join([head, *lines])


def _before_and_after(folder: Path, first: int, last: int) -> str:
    rows = read_jsonl(folder / COMPLETIONS_FILE)
    before = [row for row in rows if row["split"] == "eval" and row["iteration"] == first]
    after = [row for row in rows if row["split"] == "eval" and row["iteration"] == last]
    if not before:
        return ""
    lines = ["The same held-out prompts, before and after (score, reference KL in nats per token):"]
    for old, new in zip(before, after, strict=True):
        lines += ["", f"  {_text(old['prompt'])}"]
        for name, row in (("before", old), ("after", new)):
            label = f"{name:>8} {row['score']:6.2f} {row['ref_kl']:6.3f}  "
            indent = " " * (2 + len(label))
            text = _text(row["completion"]) or "(nothing)"
            lines.append(textwrap.fill(text, WIDTH, initial_indent=f"  {label}", subsequent_indent=indent))
    return "\n".join(lines)


def _text(value: Any) -> str:
    """Text of a prompt or completion on one line; of a chat, its last message."""
    text = value if isinstance(value, str) else value[-1]["content"]
    return text.replace("\n", "\\n").strip()


def _places(folder: Path) -> str:
    what = {
        "model": "adapter_config.json" if (folder / "adapter_config.json").exists() else "config.json",
        "metrics": LOG_FILE,
        "completions": COMPLETIONS_FILE,
    }
    lines = [f"  {name:12} {folder / file}" for name, file in what.items() if (folder / file).exists()]
    return "\n".join(["Saved:", *lines])
