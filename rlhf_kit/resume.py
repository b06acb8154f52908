"""Saving a run so that it can go on in a new process to the very same numbers, and going on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from rlhf_kit.checkpoint import (
    checkpoint_folder,
    drop_oldest,
    find_checkpoint,
    set_aside_later,
    tidy_up,
    verify,
    writing,
)
from rlhf_kit.config import PPOConfig
from rlhf_kit.folder_lock import claim, release
from rlhf_kit.journal import Journal
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.preparation import refuse_used_folder
from rlhf_kit.processes import failing_together
from rlhf_kit.state import PPOState
from rlhf_kit.training_state import TrainingState, rng_state, write_training_state
from rlhf_kit.update import Updater


class Checkpoints:
    """The checkpoints of one run.

    Args:
        args: output_dir, save_total_limit.
        accelerator: the main process writes; all read.
        model, updater, state: what is saved and restored.
        journal: owns the log, which is taken back to where the run goes on.
        identity: of the run; see `rlhf_kit.identity`.
        write_model: writes the model folder that a checkpoint is too.
    """

    def __init__(
        self,
        args: PPOConfig,
        accelerator: Accelerator,
        *,
        model: AutoModelForCausalLMWithValueHead,
        updater: Updater,
        state: PPOState,
        journal: Journal,
        identity: dict[str, Any],
        write_model: Callable[[Path], None],
    ):
        self._args, self._accelerator = args, accelerator
        self._model, self._updater, self._state, self._journal = model, updater, state, journal
        self._identity, self._write_model = identity, write_model
        self._output_dir = Path(args.output_dir)

    def save(self) -> Path:
        """Write a checkpoint after the current iteration, then drop the oldest beyond `save_total_limit`."""
        self._state.stateful_callbacks = self._journal.callback_states()
        rng_states = gather_object([rng_state()])
        folder = checkpoint_folder(self._output_dir, self._state.iteration)
        with failing_together(self._accelerator):
            if self._accelerator.is_main_process:
                self._write(folder, rng_states)
        return folder

    def _write(self, folder: Path, rng_states: list[dict[str, Any]]) -> None:
        with writing(folder) as draft:
            self._write_model(draft)
            write_training_state(
                draft,
                model=self._model,
                optimizer=self._updater.optimizer,
                state=self._state,
                identity=self._identity,
                rng_states=rng_states,
            )
        if self._args.save_total_limit is not None:
            drop_oldest(self._output_dir, self._args.save_total_limit)

    def load(self, checkpoint: str | Path | bool) -> None:
        """Go on from a checkpoint, or raise before anything has changed."""
        with failing_together(self._accelerator):
            if self._accelerator.is_main_process and self._output_dir.exists():
                claim(self._output_dir)  # or the drafts of another process would be tidied up
                tidy_up(self._output_dir)
        try:
            with failing_together(self._accelerator):
                folder = find_checkpoint(self._output_dir, checkpoint)
                saved = self._checked(folder)
                own = folder.resolve().parent == self._output_dir.resolve()
                if not own:
                    refuse_used_folder(self._output_dir)
        except Exception:
            release(self._output_dir)
            raise
        saved.apply(self._updater.optimizer, self._state, self._accelerator.process_index)
        self._updater.plan_from(self._state.iteration)
        if self._accelerator.is_main_process:
            for aside in set_aside_later(folder, self._state.iteration) if own else ():
                print(f"Later than {folder.name}, so set aside: {aside}")
            print(f"Resumed from {folder}, {self._state.iteration} of {self._args.num_iterations} iterations done.")
        self._journal.resume()

    def _checked(self, folder: Path) -> TrainingState:
        """A checkpoint that is whole and of this run."""
        verify(folder)
        saved = TrainingState(folder, self._model, self._identity)
        if saved.iteration > self._args.num_iterations:
            raise ValueError(
                f"{str(folder)!r} has done {saved.iteration} iterations, more than num_iterations="
                f"{self._args.num_iterations}: raise num_iterations. Nothing was changed."
            )
        return saved
