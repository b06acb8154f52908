"""A run that was interrupted goes on to the very numbers of one that was not."""

import gc
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TEXTS, make_lora, make_model, make_tokenizer
from fresh import run_fresh
from peft import get_peft_model
from run_resumable import Kill, make, noisy_length
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from rlhf_kit.checkpoint import _write_manifest, list_checkpoints
from rlhf_kit.signals import StopSignals
from rlhf_kit.training_state import rng_state, set_rng_state

SCRIPT = Path(__file__).parent / "run_resumable.py"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(autouse=True)
def signals_are_heard():
    """A shell or nohup that starts the tests in the background has them ignore signals, and their children too."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Lost(Exception):
    """The machine is gone."""


class LoseAt(TrainerCallback):
    def __init__(self, iteration):
        self.iteration = iteration

    def on_step_end(self, args, state, control, **kwargs):
        if state.iteration == self.iteration:
            raise Lost


def numbers(folder):
    """The log without times, as text: floats equal to the last bit."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("second", "tokens_per"))} for line in lines]


def assert_same_run(one, two, iteration=6):
    """Weights, moments, random numbers, logged numbers and completions of two folders, to the last bit."""
    for row, other in zip(numbers(one), numbers(two), strict=True):
        assert row == other
    assert (one / "completions.jsonl").read_bytes() == (two / "completions.jsonl").read_bytes()
    a, b = (load_file(folder / f"checkpoint-{iteration}" / "training_state.safetensors") for folder in (one, two))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    last = [folder / f"checkpoint-{iteration}" for folder in (one, two)]
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in last]
    for name in ("kl_coef", "score_moments", "iteration", "global_step", "episodes"):
        assert states[0][name] == states[1][name]
    assert (last[0] / "rng_states.json").read_bytes() == (last[1] / "rng_states.json").read_bytes()


def interrupted(folder, *, at, make=make, **settings):
    """A run that is lost after `at` iterations have been learned and at - 1 saved, and goes on in a new trainer."""
    with pytest.raises(Lost):
        make(folder, callbacks=[LoseAt(at)], **settings).train()
    torch.manual_seed(999)  # a new process knows nothing of the old one's generators
    random.seed(999)
    trainer = make(folder, **settings)
    trainer.train(resume_from_checkpoint=True)
    return trainer


CASES = {
    "lora": {},
    "full": {"lora": False, "learning_rate": 1e-3},
    "loss": {"kl_placement": "loss", "kl_estimator": "full", "entropy_coef": 0.01, "target_kl": None,
             "kl_horizon": 1e4},
    "sparse": {"log_every": 3, "save_every": 2, "eval_every": None},
    "early": {"max_approx_kl": 0.01, "lr_scheduler_type": "constant_with_warmup", "warmup_iterations": 2},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_six_iterations_equal_three_and_three(case, tmp_path, one_thread):
    # kills: any of weights, Adam moments, step counts, KL coefficient, score statistics, learning-rate position,
    # generators of Python, NumPy and torch left out of the checkpoint; log lines written twice or lost
    make(tmp_path / "straight", **CASES[case]).train()
    interrupted(tmp_path / "broken", at=4, **CASES[case])
    assert_same_run(tmp_path / "straight", tmp_path / "broken")


def test_resumed_twice_and_from_the_last_iteration(tmp_path, one_thread):
    # kills: state that survives one resume only; a finished run that cannot be resumed to save its model
    make(tmp_path / "straight").train()
    with pytest.raises(Lost):
        make(tmp_path / "broken", callbacks=[LoseAt(2)]).train()
    with pytest.raises(Lost):
        make(tmp_path / "broken", callbacks=[LoseAt(5)]).train(resume_from_checkpoint=True)
    make(tmp_path / "broken").train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-4"))
    (tmp_path / "broken" / "adapter_config.json").unlink()
    make(tmp_path / "broken").train(resume_from_checkpoint=True)
    assert (tmp_path / "broken" / "adapter_config.json").exists()
    assert_same_run(tmp_path / "straight", tmp_path / "broken")


def from_sft(folder, iterations=6, callbacks=(), **overrides):
    """Starts from a trained adapter, so that the reference is a frozen copy of it."""
    trained = get_peft_model(make_model("llama"), make_lora("llama"))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, p in trained.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return PPOTrainer(
        trained,
        noisy_length,
        PPOConfig(
            output_dir=str(folder), num_iterations=iterations, rollout_batch_size=4, mini_batch_size=2,
            max_completion_length=4, learning_rate=1e-2, save_every=1, **overrides,
        ),
        [{"prompt": text[:6]} for text in TEXTS],
        processing_class=make_tokenizer(),
        callbacks=list(callbacks),
    )  # fmt: skip


def test_run_from_a_trained_adapter_keeps_its_reference(tmp_path, one_thread):
    # kills: the reference made from the resumed policy instead of the start
    from_sft(tmp_path / "straight").train()
    interrupted(tmp_path / "broken", at=4, make=from_sft)
    assert_same_run(tmp_path / "straight", tmp_path / "broken")


def test_own_loop_resumes_exactly(tmp_path, one_thread):
    # kills: step() without checkpoints, generate() drawing other samples after a resume
    queries = [torch.tensor([5, 6, 7])] * 6

    def loop(folder, stop, resume=False):
        trainer = make(folder)
        if resume:
            trainer.load_checkpoint()
        while trainer.state.iteration < stop:
            responses = trainer.generate(queries)
            trainer.step(queries, responses, noisy_length([str(ids.tolist()) for ids in responses]))

    loop(tmp_path / "straight", 6)
    loop(tmp_path / "broken", 3)
    loop(tmp_path / "broken", 6, resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "broken")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the files that a process maps")
def test_a_resumed_run_holds_no_file_of_its_checkpoint(tmp_path, one_thread):
    # kills: moments that are views of the file: deleted, it fills the disk on; truncated, it ends the process
    lose(tmp_path)
    trainer = make(tmp_path)
    trainer.load_checkpoint()
    gc.collect()
    assert trainer.updater.optimizer.state
    assert "training_state.safetensors" not in Path("/proc/self/maps").read_text()


def test_random_generators_come_back(one_thread):
    # kills: one of the three generators, or NumPy's cached normal, left out
    np.random.normal()  # leaves the second of a pair cached
    random.gauss(0, 1)
    state = json.loads(json.dumps(rng_state()))

    def draw():
        return random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), float(torch.randn(()))

    first = draw()
    set_rng_state(state)
    assert draw() == first


def test_going_back_in_the_same_trainer(tmp_path, one_thread):
    # kills: moments of the abandoned iterations left in the optimizer; a trainer that can be resumed only when new
    trainer = make(tmp_path / "run", eval_every=None, save_every=None)
    trainer.save_checkpoint()
    trainer.train()
    first = numbers(tmp_path / "run")
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-0"))
    assert numbers(tmp_path / "run") == first


def test_longer_run_with_a_constant_rate_is_exact_and_a_falling_one_warns(tmp_path, one_thread):
    # kills: num_iterations refused, or a changed learning-rate plan not said
    constant = {"lr_scheduler_type": "constant", "eval_every": 3}  # the reward draws in evaluations too
    make(tmp_path / "straight", **constant).train()
    make(tmp_path / "longer", 3, **constant).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(tmp_path / "longer", 6, **constant).train(resume_from_checkpoint=True)
    a, b = (load_file(tmp_path / n / "checkpoint-6" / "training_state.safetensors") for n in ("straight", "longer"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    make(tmp_path / "falling", 2).train()
    with pytest.warns(UserWarning, match=r"num_iterations: 2 in the checkpoint, 3 now.*falls to 0"):
        make(tmp_path / "falling", 3).train(resume_from_checkpoint=True)


# Another run


def lose(folder, at=3, **settings):
    with pytest.raises(Lost):
        make(folder, callbacks=[LoseAt(at)], **settings).train()


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.trainable_parameters()}


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(trainer, folder, match, checkpoint=True, error=ValueError):
    """Nothing in memory or on disk changes."""
    before, state, rng, disk = weights(trainer), vars(trainer.state).copy(), rng_state(), files(folder)
    with pytest.raises(error, match=match):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())
    assert vars(trainer.state) == state
    assert not trainer.updater.optimizer.state
    assert rng_state() == rng
    assert files(folder) == disk


def test_every_setting_that_differs_is_listed(tmp_path):
    # kills: the first difference only, a difference ignored
    lose(tmp_path)
    trainer = make(tmp_path, learning_rate=2e-2, clip_range=0.3, seed=1, reward_weights=[2.0])
    assert_refused(
        trainer,
        tmp_path,
        r"(?s)clip_range: 0.2 in the checkpoint, 0.3 now.*learning_rate: 0.01 in the checkpoint, 0.02 now.*"
        r"reward_weights: None in the checkpoint, \[2.0\] now.*seed: 0 in the checkpoint, 1 now.*Set them back",
    )


def another(folder, **changes):
    """The run of `make` with another part."""
    parts = {"model": make_model("llama", attention_dropout=0.1), "reward_funcs": noisy_length,
             "train_dataset": [{"prompt": text[: 4 + i]} for i, text in enumerate(TEXTS)],
             "peft_config": make_lora("llama")}  # fmt: skip
    like = make(Path(folder).parent / "unused")
    return PPOTrainer(
        **{**parts, **changes},
        args=PPOConfig(**{**vars(like.args), "output_dir": str(folder)}),
        eval_dataset=[{"prompt": TEXTS[0][:9]}],
        processing_class=like.processing_class,
    )


def with_another_row():
    model = make_model("llama", attention_dropout=0.1)
    with torch.no_grad():
        model.get_input_embeddings().weight[77] += 3.0
    return model


def with_end_tokens(ids):
    model = make_model("llama", attention_dropout=0.1)
    model.generation_config.eos_token_id = ids
    return model


OTHERS = {
    "the same": ({}, None),
    "base": (lambda: {"model": make_model("llama", attention_dropout=0.1, seed=3)}, "frozen weights: not those"),
    "prompts": (lambda: {"train_dataset": [{"prompt": "Hello"}]}, "training prompts: not those"),
    "reward": (lambda: {"reward_funcs": lambda prompts: [0.0] * len(prompts)}, "functions: .*noisy_length.*lambda"),
    "alpha": (lambda: {"peft_config": make_lora("llama", lora_alpha=9)}, "lora_alpha: 8 .* 9 now"),
    "rank": (lambda: {"peft_config": make_lora("llama", r=2)}, "'default', r: 4 .*, 2 now"),
    "column": (lambda: {"train_dataset": [{"prompt": text[: 4 + i], "answer": i} for i, text in enumerate(TEXTS)]},
               "other columns: not those"),
    "one row of the base": (lambda: {"model": with_another_row()}, "frozen weights: not those"),
    "positions": (lambda: {"model": make_model("llama", attention_dropout=0.1, rope_theta=5.0)},
                  "model config, rope_"),
    "end tokens": (lambda: {"model": with_end_tokens([0, 7])}, r"end tokens: \[0\] in the checkpoint, \[0, 7\] now"),
    "no adapter": (lambda: {"peft_config": None}, "adapter 'default', r: 4 in the checkpoint, None now"),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_another_run_is_refused(other, tmp_path):
    # kills: a checkpoint applied to another base, prompts, reward or adapter of the same shapes
    lose(tmp_path / "run")
    changes, reason = OTHERS[other]
    trainer = another(tmp_path / "run", **(changes() if changes else {}))
    if reason is None:
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.iteration == 6
    else:
        assert_refused(trainer, tmp_path / "run", f"(?s){reason}")


def test_sizes_that_only_round_differently_may_change_and_are_said(tmp_path):
    # kills: no way on after running out of memory; a silent change
    lose(tmp_path)
    trainer = make(tmp_path, micro_batch_size=1, gradient_checkpointing=True)
    with pytest.warns(
        UserWarning, match=r"(?s)gradient_checkpointing: False .* True now.*micro_batch_size: 2 .* 1 now"
    ):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.iteration == 6


def test_settings_of_logging_and_saving_may_change_silently(tmp_path):
    # kills: a run that cannot be resumed because it logs more
    lose(tmp_path)
    trainer = make(tmp_path, log_every=2, save_every=4, save_total_limit=None, log_completions=1, eval_every=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.iteration == 6


# Damage


@pytest.mark.parametrize("name", ["training_state.safetensors", "trainer_state.json", "rng_states.json", "run.json",
                                  "value_head.safetensors", "adapter_model.safetensors", "manifest.json"])  # fmt: skip
def test_missing_or_damaged_files_are_refused(name, tmp_path):
    # kills: a checkpoint without value head, or with other bytes, resumed from
    lose(tmp_path)
    path = tmp_path / "checkpoint-2" / name
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\x01" + data[len(data) // 2 + 1 :])
    assert_refused(make(tmp_path), tmp_path, rf"(?s)checkpoint-2.*(has changed|damaged|{name})")
    path.unlink()
    match = "no checkpoint|missing|manifest" if name == "manifest.json" else f"{name} is missing"
    assert_refused(make(tmp_path), tmp_path, match, checkpoint=str(tmp_path / "checkpoint-2"))


def forge(folder, change):
    """Alter a checkpoint and make its manifest fit."""
    change(folder)
    (folder / "manifest.json").unlink()
    _write_manifest(folder)


def edit_json(name, key, value):
    def change(folder):
        content = json.loads((folder / name).read_text())
        content[key] = value
        (folder / name).write_text(json.dumps(content))

    return change


def edit_tensors(edit):
    def change(folder):
        tensors = load_file(folder / "training_state.safetensors")
        edit(tensors)
        save_file(tensors, folder / "training_state.safetensors")

    return change


def drop(tensors, key="weight/v_head.layers.0.bias"):
    del tensors[key]


def reshape(tensors, key="weight/v_head.layers.0.bias"):
    tensors[key] = torch.zeros(3)


def halve(tensors, key="weight/v_head.layers.0.bias"):
    tensors[key] = tensors[key].half()


def add(tensors):
    tensors["weight/other"] = torch.zeros(3)


def strange_moment(tensors):
    tensors["exp_avg/other"] = torch.zeros(3)


FORGERIES = {
    "unknown state": (edit_json("trainer_state.json", "surprise", 1), "surprise"),
    "no state": (lambda folder: (folder / "trainer_state.json").write_text("{}"), "too little.*kl_coef"),
    "statistics": (edit_json("trainer_state.json", "score_moments", {"count": 1, "no": 2}), "no checkpoint that"),
    "no config": (edit_json("run.json", "config", None), "no checkpoint that"),
    "no tensors": (lambda folder: (folder / "training_state.safetensors").write_bytes(b"x" * 8), "no checkpoint that"),
    "a pickle": (lambda folder: torch.save({}, folder / "training_state.safetensors"), "no checkpoint that"),
    "no head": (edit_tensors(drop), r"1 tensors .* v_head.layers.0.bias, is only moments in the checkpoint"),
    "shape": (edit_tensors(reshape), r"v_head.layers.0.bias, is \(\(3,\)"),
    "precision": (edit_tensors(halve), r"v_head.layers.0.bias, is .*float16"),
    "more": (edit_tensors(add), r"other, is .* and missing here"),
    "moments": (edit_tensors(strange_moment), "no checkpoint that|do not fit"),
    "no rng": (lambda folder: (folder / "rng_states.json").write_text("{}"), "no checkpoint that"),
    "bad rng": (lambda folder: (folder / "rng_states.json").write_text('[{"python": 1}]'), "no checkpoint that"),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_files_that_make_no_sense_are_refused(forgery, tmp_path):
    # kills: digests trusted, and weights changed before the rest was looked at
    lose(tmp_path)
    change, reason = FORGERIES[forgery]
    forge(tmp_path / "checkpoint-2", change)
    assert_refused(make(tmp_path), tmp_path, f"(?s){reason}")


def test_foreign_folders_are_refused(tmp_path):
    # kills: a model folder or nothing taken for a checkpoint
    lose(tmp_path / "run")
    trainer = make(tmp_path / "run")
    trainer.save_model(tmp_path / "model")
    assert_refused(trainer, tmp_path, "not a checkpoint of rlhf_kit", checkpoint=str(tmp_path / "model"))
    assert_refused(trainer, tmp_path, "no such folder", checkpoint=str(tmp_path / "nowhere"))
    assert_refused(trainer, tmp_path, r"Others here: .*run/checkpoint-2", checkpoint=str(tmp_path / "run"))
    assert_refused(make(tmp_path / "empty"), tmp_path, "holds no checkpoint", error=FileNotFoundError)


# Places


def test_going_on_from_an_earlier_checkpoint_sets_the_later_ones_aside(tmp_path, one_thread):
    # kills: a stale later checkpoint resumed from, or kept in place of a new one
    make(tmp_path / "straight").train()
    make(tmp_path / "run", save_total_limit=None).train()
    make(tmp_path / "run", save_total_limit=None).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    names = {path.name for path in (tmp_path / "run").glob("*checkpoint*")}
    assert names == {f"checkpoint-{i}" for i in range(1, 7)} | {f"superseded-checkpoint-{i}" for i in range(3, 7)}
    assert_same_run(tmp_path / "straight", tmp_path / "run")


@pytest.mark.parametrize("name", ["best", "superseded-checkpoint-2"])
def test_going_on_from_a_folder_of_another_name(name, tmp_path, one_thread):
    # kills: checkpoints of the abandoned branch taken for the newest after the next crash
    make(tmp_path / "straight").train()
    run = tmp_path / "run"
    make(run, save_total_limit=None).train()
    shutil.copytree(run / "checkpoint-2", run / name)
    lose_again = make(run, save_total_limit=None, callbacks=[LoseAt(3)])
    with pytest.raises(Lost):
        lose_again.train(resume_from_checkpoint=str(run / name))
    assert not any((run / f"checkpoint-{i}").exists() for i in (2, 3, 4, 5, 6))
    make(run, save_total_limit=None).train(resume_from_checkpoint=str(run / name))
    assert_same_run(tmp_path / "straight", run)


def test_fewer_iterations_than_were_done(tmp_path):
    # kills: "3 of 2 iterations done"
    lose(tmp_path / "run", at=4, lr_scheduler_type="constant")
    trainer = make(tmp_path / "run", iterations=2, lr_scheduler_type="constant")
    assert_refused(trainer, tmp_path / "run", "has done 3 iterations, more than num_iterations=2: raise")


def test_a_finished_run_gives_its_last_metrics(tmp_path):
    # kills: an empty dict
    metrics = make(tmp_path, iterations=2).train()
    again = make(tmp_path, iterations=2).train(resume_from_checkpoint=True)
    assert again["score"] == metrics["score"]


def test_a_callback_whose_state_cannot_be_saved_is_named(tmp_path):
    # kills: an error about JSON that does not say whose
    class Odd(Counter):
        def state(self):
            return {"args": {}, "attributes": {"seen": np.float32(1)}}

    with pytest.raises(TypeError, match="callback Odd_0 has a state that cannot be saved"):
        make(tmp_path, callbacks=[Odd()]).train()


def test_going_on_in_another_folder_takes_the_log_along_and_leaves_the_old_one(tmp_path, one_thread):
    # kills: a log that begins in the middle, files of the old run changed, a used folder overwritten
    make(tmp_path / "straight").train()
    lose(tmp_path / "old", at=4)
    before = files(tmp_path / "old")
    checkpoint = str(tmp_path / "old" / "checkpoint-3")
    stopped = make(tmp_path / "new", callbacks=[Kill(5, signal.SIGTERM)])
    stopped.train(resume_from_checkpoint=checkpoint)
    own = (tmp_path / "new" / "completions.jsonl").read_bytes()
    stopped.evaluate()
    make(tmp_path / "new").train(resume_from_checkpoint=True)
    assert numbers(tmp_path / "new") == numbers(tmp_path / "straight")
    completions = [(tmp_path / name / "completions.jsonl").read_bytes() for name in ("new", "straight")]
    assert completions[0].startswith(own)
    assert completions[1].endswith(completions[0])  # what came before stays in the old folder
    assert files(tmp_path / "old") == before
    assert_refused(make(tmp_path / "straight"), tmp_path, "already holds", checkpoint=checkpoint)


def test_an_evaluation_after_the_checkpoint_goes_with_its_completions(tmp_path, one_thread):
    # kills: completions whose log line was taken back
    make(tmp_path / "straight").train()
    trainer = make(tmp_path / "run", callbacks=[Kill(3, signal.SIGTERM)])
    trainer.train()
    trainer.evaluate()
    make(tmp_path / "run").train(resume_from_checkpoint="last")
    assert_same_run(tmp_path / "straight", tmp_path / "run")


def test_a_run_in_the_same_process_takes_the_folder_over(tmp_path, one_thread):
    # kills: a lock that a finished run, or one whose trainer still exists, keeps; a lock file left in the model folder
    args = {"save_every": 1, "eval_every": None}
    trainer = make(tmp_path / "run", 2, **args)
    assert trainer.train()["iteration"] == 2
    assert not (tmp_path / "run" / ".lock").exists()
    trainer.evaluate()
    with pytest.raises(FileNotFoundError):
        make(tmp_path / "nowhere").train(resume_from_checkpoint="last")
    assert not (tmp_path / "nowhere").exists()


def test_a_line_cut_off_by_a_kill_goes(tmp_path, one_thread):
    # kills: a torn line left in the middle of the log
    make(tmp_path / "straight").train()
    lose(tmp_path / "run", at=4)
    for name in ("log.jsonl", "completions.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"iteration": 4, "sco')
    make(tmp_path / "run").train(resume_from_checkpoint=True)
    assert_same_run(tmp_path / "straight", tmp_path / "run")


def test_number_of_checkpoints_kept_and_when_they_are_written(tmp_path):
    # kills: save_every or save_total_limit ignored, the last iteration not saved
    make(tmp_path / "two", save_every=2).train()
    assert [path.name for path in list_checkpoints(tmp_path / "two")] == ["checkpoint-4", "checkpoint-6"]
    make(tmp_path / "all", save_every=4, save_total_limit=None).train()
    assert [path.name for path in list_checkpoints(tmp_path / "all")] == ["checkpoint-4", "checkpoint-6"]
    make(tmp_path / "none", save_every=None).train()
    assert list_checkpoints(tmp_path / "none") == []


def test_a_checkpoint_is_a_model_folder(tmp_path):
    # kills: a checkpoint that only the trainer can read
    trainer = make(tmp_path)
    trainer.train()
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(
        get_peft_model(make_model("llama"), make_lora("llama")), value_head="mlp"
    )
    loaded.pretrained_model.load_adapter(str(tmp_path / "checkpoint-6"), adapter_name="saved")
    loaded.pretrained_model.set_adapter("saved")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded.pretrained_model(ids).logits, trainer.model.pretrained_model.eval()(ids).logits)


class SaveAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.iteration == 3


class Counter(TrainerCallback, ExportableState):
    def __init__(self):
        self.seen = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.seen += 1

    def state(self):
        return {"args": {}, "attributes": {"seen": self.seen}}


def test_callbacks_may_ask_for_a_checkpoint_and_keep_their_state(tmp_path):
    # kills: control.should_save ignored or never reset, states of callbacks lost
    with pytest.raises(Lost):
        make(tmp_path, save_every=None, callbacks=[SaveAt(), Counter(), LoseAt(5)]).train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-3"]
    counter = Counter()
    make(tmp_path, save_every=None, callbacks=[counter]).train(resume_from_checkpoint=True)
    assert counter.seen == 6


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_iteration_saves_and_ends(number, tmp_path, capsys, one_thread):
    # kills: an iteration cut in half, no checkpoint, the evaluation that was due lost, the half-trained model saved as
    # if finished, handlers left behind
    make(tmp_path / "straight").train()
    before = signal.getsignal(number)
    trainer = make(tmp_path / "run", callbacks=[Kill(4, number)], save_every=None)
    metrics = trainer.train()
    assert metrics["kl_coef"] > 0
    assert trainer.state.iteration == 4
    assert signal.getsignal(number) == before
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    assert not (tmp_path / "run" / "adapter_config.json").exists()
    assert "resume_from_checkpoint=True" in capsys.readouterr().out
    make(tmp_path / "run").train(resume_from_checkpoint=True)
    assert_same_run(tmp_path / "straight", tmp_path / "run")


def test_second_interrupt_ends_at_once_but_not_one_that_a_launcher_repeats(monkeypatch):
    # kills: no way out of a long iteration; a launcher's repetition taken for impatience
    now = [0.0]
    monkeypatch.setattr("rlhf_kit.signals.time.monotonic", lambda: now[0])
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        now[0] = 0.5
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGINT"
        now[0] = 1.5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_are_left_alone():
    # kills: training in a thread, as notebooks and servers do, failing on signal.signal
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run():
        with StopSignals() as signals:
            seen.append((signals.received, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_what_is_ignored_stays_ignored_and_a_hang_up_is_a_request():
    # kills: nohup undone; a closed terminal ending the run without a checkpoint
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.requested()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.requested()
            assert signals.received == "SIGHUP"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_launcher_that_is_gone_is_a_request_only_where_it_should_have_waited(monkeypatch):
    # kills: training on after `accelerate launch` was killed; ending it because a shell that started it is gone
    for mixed_precision, local_rank, expected in (("no", None, True), (None, None, False), ("no", "0", False)):
        for name, value in (("ACCELERATE_MIXED_PRECISION", mixed_precision), ("LOCAL_RANK", local_rank)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        parent = os.getppid()
        with StopSignals() as signals, monkeypatch.context() as patch:
            assert not signals.requested()
            patch.setattr("rlhf_kit.signals.os.getppid", lambda parent=parent: parent + 1)
            assert signals.requested() == expected


# New processes


@pytest.mark.slow
def test_iterations_in_one_process_and_the_rest_in_others(tmp_path):
    # kills: state that lives in the process only; a stop that is not a clean end
    straight = run_fresh(SCRIPT, tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    killed = run_fresh(SCRIPT, tmp_path / "broken", "--kill-after", "3")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for after, number in (("4", signal.SIGTERM), ("5", signal.SIGINT)):
        stop = ["--resume", "--kill-after", after, "--signal", int(number)]
        stopped = run_fresh(SCRIPT, tmp_path / "broken", *stop)
        assert stopped.returncode == 0, stopped.stderr
        assert f"Stopped after {after} of 6" in stopped.stdout
    resumed = subprocess.run([sys.executable, SCRIPT, tmp_path / "broken", "--resume"], env=ENV, check=False)
    assert resumed.returncode == 0
    assert_same_run(tmp_path / "straight", tmp_path / "broken")


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ctrl-c", "terminate", "hang up"])
def test_accelerate_launch_is_stopped_with_a_checkpoint(way, tmp_path):
    # kills: a run lost because its launcher died of the signal, or because the terminal went with the launcher
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "1", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip
    command = [sys.executable, *launch, str(SCRIPT), str(tmp_path / "run"), "--slow", "1.5", "--unsaved"]
    launcher, terminal = pty.fork()  # the launcher leads the session, so the terminal goes when it does
    if launcher == 0:
        os.execve(sys.executable, command, ENV)
    output = b""
    while b"STEP 1 " not in output or b"\n" not in output.rsplit(b"STEP 1 ", 1)[1]:
        output += os.read(terminal, 4096)
    trainer = int(output.rsplit(b"STEP 1 ", 1)[1].split()[0])
    if way == "ctrl-c":
        os.write(terminal, b"\x03")
    elif way == "terminate":
        os.kill(launcher, signal.SIGTERM)
    else:
        os.close(terminal)
    os.waitpid(launcher, 0)
    wait_for(lambda: not is_running(trainer))
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    assert not (tmp_path / "run" / "adapter_config.json").exists()  # it ended there, rather than training on
    resumed = run_fresh(SCRIPT, tmp_path / "run", "--resume")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.slow
def test_two_processes_do_not_write_into_one_folder(tmp_path):
    # kills: log lines of two runs mixed, the drafts of a running process tidied away by one that wants to resume
    command = [sys.executable, SCRIPT, tmp_path / "run", "--slow", "2"]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        while not first.stdout.readline().startswith("STEP 1 "):
            pass
        before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
        trainer = make(tmp_path / "run")
        with pytest.raises(ValueError, match=rf"by another process \(number {first.pid}\)"):
            trainer.train(resume_from_checkpoint=True)
        after = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
        assert before == after
        first.kill()
    assert (tmp_path / "run" / ".lock").exists()
    trainer.train(resume_from_checkpoint=True)  # a lock that a kill left behind locks nothing
    assert trainer.state.iteration == 6


@pytest.mark.slow
def test_sixty_kills_at_random_moments(tmp_path):
    # kills: a checkpoint put in place before it is whole, a log that cannot be read after a kill
    def newest_checkpoints(name, *options):
        command = [sys.executable, SCRIPT.with_name("run_kills.py"), tmp_path / name, *map(str, options)]
        done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    kills = 60
    moments = newest_checkpoints("run", "--kills", kills)
    assert len(moments) == kills + 1
    assert moments == sorted(moments)  # nothing that was saved is lost
    assert len(set(moments)) > kills // 3  # the kills did fall into different iterations
    newest_checkpoints("straight", "--iterations", moments[-1])
    try:
        assert_same_run(tmp_path / "straight", tmp_path / "run", moments[-1])
    except AssertionError as difference:
        newest_checkpoints("straight again", "--iterations", moments[-1])  # the control
        if numbers(tmp_path / "straight") != numbers(tmp_path / "straight again"):
            pytest.skip(f"on this machine two runs that nobody kills differ as well; the killed one: {difference}")
        print("newest checkpoint after each kill:", moments)
        raise
