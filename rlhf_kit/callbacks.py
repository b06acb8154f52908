"""What a run tells the outside: the log on disk, the terminal, the trackers. All are `TrainerCallback` objects.

One iteration is one "step" of the callback interface: `on_step_begin`, `on_step_end`, `on_log` (with `logs` and
`completions`), `on_evaluate`, and `on_train_begin` / `on_train_end` around them.
"""

import atexit
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import ExportableState

from rlhf_kit.config import PPOConfig
from rlhf_kit.state import PPOState

LOG_FILE = "log.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
CONFIG_FILE = "ppo_config.json"


class CallbackList:
    """Calls an event of every callback, in order.

    Args:
        callbacks: `TrainerCallback` objects or classes.
        context: keyword arguments that every event gets, e.g. model.

    Raises:
        TypeError: something that is not a `TrainerCallback`.
    """

    def __init__(self, callbacks: Sequence[Any], **context: Any):
        self._callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        for callback in self._callbacks:
            if not isinstance(callback, TrainerCallback):
                raise TypeError(f"callbacks must be transformers.TrainerCallback objects, got {callback!r}.")
        self._context = context

    def __call__(
        self, event: str, args: PPOConfig, state: PPOState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Fire an event; a callback may change the control or return another one."""
        for callback in self._callbacks:
            control = getattr(callback, event)(args, state, control, **self._context, **kwargs) or control
        return control

    def states(self) -> dict[str, Any]:
        """States of the callbacks that have one, by class name and number."""
        states = {key: callback.state() for key, callback in self._stateful().items()}
        for key, state in states.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"callback {key} has a state that cannot be saved: {error}. Use JSON values."
                ) from error
        return states

    def load_states(self, states: dict[str, Any]) -> None:
        """Set the attributes of stateful callbacks back; one that the states do not know stays as it is."""
        for key, callback in self._stateful().items():
            for name, value in states.get(key, {}).get("attributes", {}).items():
                setattr(callback, name, value)

    def _stateful(self) -> dict[str, ExportableState]:
        found = [callback for callback in self._callbacks if isinstance(callback, ExportableState)]
        return {f"{type(callback).__name__}_{i}": callback for i, callback in enumerate(found)}


class JsonlLog(TrainerCallback):
    """Appends metrics and completions to JSON-lines files in `output_dir`, and writes the config beside them."""

    def on_log(
        self, args: PPOConfig, state: PPOState, control: TrainerControl, *, logs: dict[str, float],
        completions: list[dict[str, Any]], **kwargs: Any,
    ) -> None:  # fmt: skip
        """Append one line of metrics and one line per completion."""
        folder = Path(args.output_dir)
        if not (folder / LOG_FILE).exists():
            self._start(args)
        _append_lines(folder / LOG_FILE, [logs])
        _append_lines(folder / COMPLETIONS_FILE, completions)
        state.completions_logged += len(completions)

    def rewind(self, args: PPOConfig, state: PPOState) -> None:
        """Bring the files to where a resumed run goes on: later lines go, and so does one that a kill cut off."""
        self._start(args)
        path = Path(args.output_dir) / COMPLETIONS_FILE
        rows = read_jsonl(path) if path.exists() else []
        rows = rows[: state.completions_logged]  # none, if it goes on in another folder
        _replace_lines(path, rows)
        state.completions_logged = len(rows)
        _replace_lines(Path(args.output_dir) / LOG_FILE, state.log_history)

    def _start(self, args: PPOConfig) -> None:
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(args), indent=2) + "\n")


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")  # texts may hold other line separators
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline was cut off by a kill


def _replace_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    _append_lines(draft, rows)
    draft.replace(path)


def _append_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(
            json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=str) + "\n" for row in rows
        )


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinity are not JSON: written as null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


class Progress(TrainerCallback):
    """One line per logged iteration; on a terminal also a bar that says which phase runs."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def on_train_begin(self, args: PPOConfig, state: PPOState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the bar."""
        self._bar = tqdm(
            total=args.num_iterations, initial=state.iteration, unit="it", disable=not sys.stderr.isatty(), leave=False
        )

    def phase(self, name: str) -> None:
        """Show what runs now: generate, score, update, evaluate."""
        if self._bar is not None:
            self._bar.set_description(name)

    def on_step_end(self, args: PPOConfig, state: PPOState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update(1)

    def on_log(
        self, args: PPOConfig, state: PPOState, control: TrainerControl, *, logs: dict[str, float], **kwargs: Any
    ) -> None:
        """Print the numbers that matter most: is the score rising, and what does it cost?"""
        kind = "eval" if "eval_score" in logs else "train"
        prefix = "eval_" if kind == "eval" else ""
        line = (
            f"{kind:5} {state.iteration:>{len(str(args.num_iterations))}}/{args.num_iterations}"
            f" | score {logs[prefix + 'score']:8.3f}"
            f" | reference KL {logs[prefix + 'ref_kl']:7.4f} nats/token"
            f" | length {logs[prefix + 'completion_length']:6.1f}"
        )
        if kind == "train":
            line += (
                f" | entropy {logs['entropy']:6.3f} | clipped {logs.get('clip_fraction', 0.0):6.1%}"
                f" | {logs['seconds']:6.1f} s, {logs['tokens_per_second']:.0f} tokens/s"
            )
            if logs["skipped_steps"]:
                line += f" | {logs['skipped_steps']:.0f} optimizer steps skipped: loss or gradient not finite"
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def on_train_end(self, args: PPOConfig, state: PPOState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Trackers(TrainerCallback):
    """TensorBoard, W&B, trackio and the like, through Accelerate.

    Args:
        accelerator: made with `log_with=args.report_to`.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator

    def on_init_end(self, args: PPOConfig, state: PPOState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the trackers with the config."""
        name = args.run_name or Path(args.output_dir).name
        scalars = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in asdict(args).items()}
        init_kwargs = {"wandb": {"name": name}, "trackio": {"name": name}}
        self._accelerator.init_trackers("rlhf_kit", config=scalars, init_kwargs=init_kwargs)
        if self._accelerator.trackers:  # not at the end of training: evaluations may follow
            atexit.register(self._accelerator.end_training)

    def on_log(
        self, args: PPOConfig, state: PPOState, control: TrainerControl, *, logs: dict[str, float],
        completions: list[dict[str, Any]], **kwargs: Any,
    ) -> None:  # fmt: skip
        """Send metrics, and completions to those trackers that have tables."""
        self._accelerator.log(logs, step=state.iteration)
        for tracker in self._accelerator.trackers:
            if completions and hasattr(tracker, "log_table"):
                columns = list(completions[0])
                data = [[str(row[column]) for column in columns] for row in completions]
                tracker.log_table("completions", columns=columns, data=data, step=state.iteration)
