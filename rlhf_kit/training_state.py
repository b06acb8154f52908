"""What a checkpoint holds besides the saved model.

    training_state.safetensors   weights and optimizer moments of everything that is trained, by parameter name
    trainer_state.json           `PPOState`: iteration, KL coefficient, statistics of the scores, log
    rng_states.json              random number generators of Python, NumPy and torch in each process
    run.json                     what the run was, see `rlhf_kit.identity`

The prompts and samples of an iteration, the shuffling and the learning rate are pure functions of seed and iteration:
they need no state. Nothing here is a pickle.
"""

import base64
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_kit.identity import compare_runs, refuse_another_run
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.state import PPOState

TENSORS_FILE = "training_state.safetensors"
STATE_FILE = "trainer_state.json"
RNG_FILE = "rng_states.json"
RUN_FILE = "run.json"
PROGRESS = ("iteration", "global_step", "episodes", "kl_coef", "score_moments", "nonfinite_iterations",
            "evaluation_due", "completions_logged", "log_history", "stateful_callbacks")  # fmt: skip


def write_training_state(
    folder: Path,
    *,
    model: AutoModelForCausalLMWithValueHead,
    optimizer: torch.optim.Optimizer,
    state: PPOState,
    identity: dict[str, Any],
    rng_states: list[dict[str, Any]],
) -> None:
    """Write the files above.

    Args:
        folder: exists.
        model, optimizer: what is trained; moments are stored under parameter names.
        state: progress.
        identity: from `run_identity`.
        rng_states: one per process, from `rng_state`.
    """
    tensors = {f"weight/{name}": p.detach() for name, p in model.trainable_parameters()}
    for name, p in model.trainable_parameters():
        tensors |= {f"{key}/{name}": value for key, value in optimizer.state.get(p, {}).items()}
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, folder / TENSORS_FILE)
    progress = dataclasses.asdict(state)
    _write_json(folder / STATE_FILE, {name: progress[name] for name in PROGRESS})
    _write_json(folder / RNG_FILE, rng_states)
    _write_json(folder / RUN_FILE, identity)


class TrainingState:
    """A checkpoint's files, read and checked against a model. Until `apply` nothing is changed.

    Args:
        folder: verified by `rlhf_kit.checkpoint.verify`.
        model: whose trained parameters must be those of the checkpoint, in name, shape and precision.
        identity: of this run; see `rlhf_kit.identity`.

    Raises:
        ValueError: another run, another model, or files that do not make sense.
    """

    def __init__(self, folder: Path, model: AutoModelForCausalLMWithValueHead, identity: dict[str, Any]):
        try:
            saved = _read_json(folder / RUN_FILE)
            self._state = _state(_read_json(folder / STATE_FILE))
            self._rng_states = _tried_rng_states(_read_json(folder / RNG_FILE))
            tensors = load_file(folder / TENSORS_FILE)
            differences = compare_runs(saved, identity)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"{str(folder)!r} is no checkpoint that this version can read: {error!r}.") from error
        refuse_another_run(*differences)
        self.iteration = self._state.iteration  # iterations that were done
        self._model = model
        self._weights = {k.removeprefix("weight/"): v for k, v in tensors.items() if k.startswith("weight/")}
        self._moments = [(*k.split("/", 1), v) for k, v in tensors.items() if not k.startswith("weight/")]
        self._check_weights(folder)

    def _check_weights(self, folder: Path) -> None:
        expected = {name: (tuple(p.shape), p.dtype) for name, p in self._model.trainable_parameters()}
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._weights.items()}
        found |= {name: "only moments" for _, name, _ in self._moments if name not in found}
        wrong = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"{len(wrong)} tensors of {str(folder)!r} do not fit the model's {len(expected)} trained ones: the "
                f"first, {name}, is {found.get(name, 'missing')} in the checkpoint and "
                f"{expected.get(name, 'missing')} here. Nothing was changed."
            )

    @torch.no_grad()
    def apply(self, optimizer: torch.optim.Optimizer, state: PPOState, process_index: int) -> None:
        """Set the model's weights, the optimizer's moments, the progress and this process's random generators."""
        parameters = dict(self._model.trainable_parameters())
        for name, weight in self._weights.items():
            parameters[name].copy_(weight)
        optimizer.state.clear()
        for key, name, value in self._moments:
            p = parameters[name]
            device = p.device if value.shape == p.shape else "cpu"  # counts stay on the CPU
            optimizer.state[p][key] = value.to(device, copy=True)  # else it keeps the file, which may be deleted, open
        for name in PROGRESS:
            setattr(state, name, getattr(self._state, name))
        if process_index < len(self._rng_states):
            set_rng_state(self._rng_states[process_index])


def _state(progress: dict[str, Any]) -> PPOState:
    """The rest of a state belongs to the process, or to transformers' version of it."""
    wrong = set(PROGRESS) ^ set(progress)
    if wrong:
        raise KeyError(f"{STATE_FILE} has too little or too much: {sorted(wrong)}")
    return PPOState(**progress)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


# Random numbers, as reward functions and callbacks may draw them


def rng_state() -> dict[str, Any]:
    """States of the global generators of this process, as JSON values."""
    version, internal, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo everything since `rng_state` gave this."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_text(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(state["cuda"]))


def _tried_rng_states(states: Any) -> list[dict[str, Any]]:
    """The states, each of which the generators have been seen to take."""
    if not isinstance(states, list) or not states:
        raise TypeError(f"{RNG_FILE} must hold a list with one entry per process.")
    own = rng_state()
    try:
        for state in states:
            set_rng_state(state)
    finally:
        set_rng_state(own)
    return states


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
