"""Plain script that test_resume.py starts, kills and starts again: one small run in its own folder.

python run_resumable.py FOLDER [--resume] [--iterations N] [--kill-after N] [--signal N] [--slow SECONDS] [--unsaved]
"""

import argparse
import os
import random
import signal
import time

import numpy as np
import torch
from conftest import TEXTS, make_lora, make_model, make_tokenizer
from transformers import TrainerCallback

from rlhf_kit import PPOConfig, PPOTrainer

SETTINGS = {
    "rollout_batch_size": 6, "mini_batch_size": 4, "micro_batch_size": 2, "ppo_epochs": 2, "max_completion_length": 5,
    "learning_rate": 1e-2, "value_head": "mlp", "target_kl": 0.05, "kl_horizon": 50, "scale_scores": True,
    "whiten_rewards": True, "save_every": 1, "lr_scheduler_type": "cosine", "eval_every": 2, "temperature": 0.9,
}  # fmt: skip


def noisy_length(completions, **_):
    """Draws from every global generator, as a user's reward may."""
    draws = [random.random() + np.random.rand() + float(torch.rand(())) for _ in completions]
    return [len(text) + draw for text, draw in zip(completions, draws, strict=True)]


class Kill(TrainerCallback):
    """Ends the process as a lost machine would, or asks it to stop, after some iterations."""

    def __init__(self, iteration, number):
        self.iteration, self.number = iteration, number

    def on_step_end(self, args, state, control, **kwargs):
        if state.iteration == self.iteration:
            os.kill(os.getpid(), self.number)


class Slow(TrainerCallback):
    """Makes iterations long enough to be interrupted from outside."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_step_begin(self, args, state, control, **kwargs):
        print("STEP", state.iteration, os.getpid(), flush=True)
        time.sleep(self.seconds)


def make(folder, iterations=6, callbacks=(), lora=True, **overrides):
    return PPOTrainer(
        make_model("llama", attention_dropout=0.1),
        noisy_length,
        PPOConfig(output_dir=str(folder), num_iterations=iterations, **{**SETTINGS, **overrides}),
        [{"prompt": text[: 4 + i]} for i, text in enumerate(TEXTS)],
        [{"prompt": TEXTS[0][:9]}],
        processing_class=make_tokenizer(),
        peft_config=make_lora("llama") if lora else None,
        callbacks=list(callbacks),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--kill-after", type=int, default=-1)
    parser.add_argument("--signal", type=int, default=signal.SIGKILL)
    parser.add_argument("--slow", type=float)
    parser.add_argument("--unsaved", action="store_true")
    given = parser.parse_args()
    kill = Kill(given.kill_after, given.signal)
    slow = [] if given.slow is None else [Slow(given.slow)]
    trainer = make(given.folder, given.iterations, [kill, *slow], save_every=None if given.unsaved else 1)
    print("READY", flush=True)
    trainer.train(resume_from_checkpoint=given.resume or None)
    print("DONE", trainer.state.iteration, flush=True)
