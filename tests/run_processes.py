"""Plain script that test_processes.py starts on one or two processes. What it saw goes to FOLDER/rank-<i>.pt.

python run_processes.py FOLDER MODE      MODE: a key of MODES
"""

import sys
import time

import torch
from conftest import TEXTS, make_lora, make_model, make_tokenizer
from torch.distributed.tensor import DTensor

from rlhf_kit import PPOConfig, PPOTrainer

SETTINGS = {
    "rollout_batch_size": 6, "mini_batch_size": 4, "micro_batch_size": 2, "ppo_epochs": 2, "num_iterations": 4,
    "max_completion_length": 5, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "target_kl": 1e-6,
    "kl_horizon": 100, "scale_scores": True, "whiten_rewards": True, "save_every": 1, "eval_every": 1,
    "log_completions": 6,
}  # fmt: skip
SEEN = []


def reward(prompts, completions, completion_ids):
    """Notes the rows it is shown, and scores them."""
    SEEN.append({"prompts": prompts, "completion_ids": completion_ids})
    return [float(len(text)) for text in completions]


def noisy(completions):
    return [len(text) + float(torch.rand(())) for text in completions]


def make_trainer(folder, reward=reward, **overrides):
    return PPOTrainer(
        make_model("llama"),
        reward,
        PPOConfig(output_dir=f"{folder}/run", **{**SETTINGS, **overrides}),
        [{"prompt": text[: 4 + i]} for i, text in enumerate(TEXTS)],
        [{"prompt": text[: 5 + i]} for i, text in enumerate(TEXTS)],  # three: uneven shares
        processing_class=make_tokenizer(),
        peft_config=make_lora("llama"),
    )


def record_first_gradient(trainer):
    """Gradients as the first optimizer step sees them."""
    gradients = {}
    step = trainer.updater.optimizer.step

    def recording(*args, **kwargs):
        if not gradients:
            gradients.update({name: p.grad.clone() for name, p in trainer.model.trainable_parameters()})
        return step(*args, **kwargs)

    trainer.updater.optimizer.step = recording
    return gradients


def two_given_iterations(trainer):
    """The same ragged global batch whatever the number of processes."""
    world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    prompts = [trainer.processing_class(TEXTS[i % 3][: 3 + 2 * i]).input_ids for i in range(6)]
    share = slice(rank * 6 // world, (rank + 1) * 6 // world)
    gradients, metrics = record_first_gradient(trainer), []
    for iteration in range(2):
        generator = torch.Generator().manual_seed(iteration)
        responses = [torch.randint(1, 300, (1 + i,), generator=generator) for i in range(6)]
        scores = [float(i + iteration) for i in range(6)]
        queries = [torch.tensor(ids) for ids in prompts]
        metrics.append(trainer.step(queries[share], responses[share], scores[share]))
    return gradients, [{k: v for k, v in m.items() if "second" not in k} for m in metrics]


def train(folder):
    trainer = make_trainer(folder)
    gradients, metrics = two_given_iterations(trainer)
    weights = {name: p.detach().clone() for name, p in trainer.model.trainable_parameters()}
    moments = vars(trainer.state.score_moments).copy()
    kl_coef = trainer.state.kl_coef
    trainer.train()  # two more, which sample
    base = {n: p for n, p in trainer.model.named_parameters() if not p.requires_grad}
    return {
        "gradients": gradients, "metrics": metrics, "weights": weights, "moments": moments, "kl_coef": kl_coef,
        "seen": SEEN, "final": {name: p.detach().clone() for name, p in trainer.model.trainable_parameters()},
        "sharded": sum(isinstance(p, DTensor) for p in base.values()),
        "local": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in base.values()),
        "base": {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in base.items()},
    }  # fmt: skip


def resume(folder):
    """Four sampled iterations straight, and two, then two in a new trainer; the reward draws in each process."""
    make_trainer(f"{folder}/straight", noisy).train()
    make_trainer(f"{folder}/broken", noisy, num_iterations=2).train()
    trainer = make_trainer(f"{folder}/broken", noisy)
    trainer.train(resume_from_checkpoint=True)
    return {"iteration": trainer.state.iteration}


def fail(folder):
    """The reward fails in the last process only."""

    def broken(completions):
        if trainer.accelerator.process_index == trainer.accelerator.num_processes - 1:
            raise ZeroDivisionError("the reward server is gone")
        return [1.0] * len(completions)

    trainer = make_trainer(folder, broken)
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "notes": getattr(error, "__notes__", [])}


def die(folder):
    """One process ends without a word to the others."""
    trainer = make_trainer(folder)
    if trainer.accelerator.process_index == 1:
        raise MemoryError("out of memory")
    trainer.train()


def long(folder):
    """Goes on until somebody stops it."""
    trainer = make_trainer(folder, num_iterations=10_000, eval_every=None, save_every=None)
    trainer.train()
    return {"iteration": trainer.state.iteration}


def uneven(folder):
    """Five prompts on two processes, completions that end early in one and late in the other."""
    sizes = {"rollout_batch_size": 5, "mini_batch_size": 3, "micro_batch_size": 1, "generation_batch_size": 2}
    trainer = make_trainer(folder, max_completion_length=12, stop_token_ids=list(range(0, 300, 5)), **sizes)
    trainer.train()
    final = {name: p.detach().clone() for name, p in trainer.model.trainable_parameters()}
    return {"seen": SEEN, "iteration": trainer.state.iteration, "final": final}


def roles(folder):
    """Policy, reference, critic and reward model as four adapters on one base; `folder` holds base, sft and reward."""

    def note(completions, log_metric, log_extra):
        log_metric("rank", float(trainer.accelerator.process_index))
        log_extra("length", [len(text) for text in completions])
        return [[0.01] * n for n in map(len, SEEN.pop())]

    def remember(completion_ids):
        SEEN.append(completion_ids)
        return [0.0] * len(completion_ids)

    settings = {**SETTINGS, "critic": "adapter", "gradient_checkpointing": True, "eval_every": None}
    prompts = [{"prompt": text[: 4 + i]} for i, text in enumerate(TEXTS)]
    trainer = PPOTrainer(f"{folder}/sft", [f"{folder}/reward", remember, note],
                         PPOConfig(output_dir=f"{folder}/run", **settings), prompts)  # fmt: skip
    scores = trainer.reward_funcs._funcs[0]([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])
    gradients, metrics = two_given_iterations(trainer)
    weights = {name: p.detach().clone() for name, p in trainer.model.trainable_parameters()}
    last = trainer.train()
    return {
        "gradients": gradients, "weights": weights, "metrics": metrics, "scores": torch.tensor(scores),
        "final": {name: p.detach().clone() for name, p in trainer.model.trainable_parameters()},
        "last": {k: v for k, v in last.items() if "second" not in k},
    }  # fmt: skip


MODES = {"roles": roles, "train": train, "resume": resume, "fail": fail, "die": die, "long": long, "uneven": uneven}

if __name__ == "__main__":
    folder, mode = sys.argv[1:]
    start = time.time()
    result = MODES[mode](folder)
    world = int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if world > 1 else 0
    torch.save({**result, "world": world, "seconds": time.time() - start}, f"{folder}/rank-{rank}.pt")
