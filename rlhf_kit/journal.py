"""What happens when, told to whoever listens: phases are timed, log lines written when due, callbacks called."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl

from rlhf_kit.callbacks import CallbackList, JsonlLog, Progress, Trackers
from rlhf_kit.config import PPOConfig
from rlhf_kit.folder_lock import claim, release
from rlhf_kit.metrics import completion_rows
from rlhf_kit.preparation import refuse_used_folder
from rlhf_kit.processes import failing_together
from rlhf_kit.rollout import Rollout
from rlhf_kit.state import PPOState


class Journal:
    """The run as seen from outside.

    Args:
        args: what is logged how often, and where.
        state: read, and its log history is written.
        accelerator: files and terminal belong to the main process, trackers open themselves there.
        callbacks: the user's, called after our own.
        context: keyword arguments that every event gets, e.g. model.

    Attributes:
        control: what callbacks asked for.
    """

    def __init__(
        self,
        args: PPOConfig,
        state: PPOState,
        accelerator: Accelerator,
        callbacks: list[TrainerCallback],
        **context: Any,
    ):
        self._args, self._state, self._accelerator = args, state, accelerator
        self._progress, self._files = Progress(), JsonlLog()
        on_main = [self._files, self._progress] if accelerator.is_main_process else []
        self._callbacks = CallbackList([*on_main, Trackers(accelerator), *callbacks], **context)
        self.control = TrainerControl()
        self._seconds: dict[str, float] = defaultdict(float)
        self._unlogged: tuple[dict[str, float], list[dict[str, Any]]] | None = None
        self._is_open = False

    def open(self) -> None:
        """Claim `output_dir`, before the first thing is written there.

        Raises:
            ValueError: it holds another run, or another process writes to it.
        """
        folder = Path(self._args.output_dir)
        if not self._is_open:
            refuse_used_folder(folder)
            self._accelerator.wait_for_everyone()  # nobody writes before all have looked
        with failing_together(self._accelerator):
            if self._accelerator.is_main_process:
                claim(folder)
        self._is_open = True

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open inside the `with` block; afterwards other processes may write to `output_dir`."""
        self.open()
        try:
            yield
        finally:
            release(Path(self._args.output_dir))

    def resume(self) -> None:
        """Claim `output_dir` for a run that goes on, and take back what was logged after its checkpoint."""
        self._is_open = True
        self._unlogged = None
        self._callbacks.load_states(self._state.stateful_callbacks)
        if self._accelerator.is_main_process:
            claim(Path(self._args.output_dir))
            self._files.rewind(self._args, self._state)

    def emit(self, event: str, **kwargs: Any) -> None:
        """Call an event of every callback."""
        self.control = self._callbacks(event, self._args, self._state, self.control, **kwargs)

    def callback_states(self) -> dict[str, Any]:
        """What stateful callbacks need to go on."""
        return self._callbacks.states()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shown on the progress bar, and timed."""
        self._progress.phase(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def iteration(self, rollout: Rollout, metrics: dict[str, float], *, last: bool) -> None:
        """Add the times to the metrics of an iteration, and log them if it is time."""
        args, done = self._args, self._state.iteration
        seconds = sum(self._seconds.values())
        metrics["seconds"] = seconds
        metrics |= {f"seconds_{name}": value for name, value in self._seconds.items()}
        metrics["tokens_per_second"] = float(rollout.completion_mask.sum()) / max(seconds, 1e-9)
        self._seconds.clear()
        asked, self.control.should_log = self.control.should_log, False
        rows = completion_rows(rollout, args.log_completions, split="train", iteration=done)
        due = asked or done % args.log_every == 0 or done == 1 or last
        self._unlogged = None if due else (metrics, rows)
        if due:
            self._log(metrics, rows)

    def evaluation(self, rollout: Rollout, metrics: dict[str, float]) -> None:
        """Log an evaluation, with all of its completions if any are wanted."""
        rows = completion_rows(rollout, len(rollout), split="eval", iteration=self._state.iteration)
        self._seconds.clear()
        self._log(metrics, rows if self._args.log_completions else [])
        self.emit("on_evaluate", metrics=metrics)

    def catch_up(self) -> None:
        """Log the last iteration if it was not: something ended the run after the decision not to."""
        if self._unlogged is not None:
            self._log(*self._unlogged)
            self._unlogged = None

    def _log(self, metrics: dict[str, float], completions: list[dict[str, Any]]) -> None:
        state = self._state
        progress = {"iteration": state.iteration, "global_step": state.global_step, "episodes": state.episodes}
        logs = {**progress, **metrics}
        state.log_history.append(logs)
        self.emit("on_log", logs=logs, completions=completions)
