"""Plain script that test_processes.py starts on one or two processes: the same global batch, then weights to disk."""

import sys

import torch
from conftest import TEXTS, make_lora, make_model, make_tokenizer

from rlhf_kit import PPOConfig, PPOTrainer


def main(folder: str) -> None:
    tokenizer = make_tokenizer()
    args = PPOConfig(
        output_dir=f"{folder}/run", rollout_batch_size=6, mini_batch_size=4, micro_batch_size=2, ppo_epochs=2,
        num_iterations=3, max_completion_length=5, learning_rate=1e-2, lr_scheduler_type="constant", target_kl=1e-6,
        kl_horizon=100, scale_scores=True,
    )  # fmt: skip
    trainer = PPOTrainer(
        make_model("llama"),
        lambda completions: [float(len(text)) for text in completions],
        args,
        [{"prompt": text[: 4 + i]} for i, text in enumerate(TEXTS)],
        processing_class=tokenizer,
        peft_config=make_lora("llama"),
    )
    world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    prompts = [tokenizer(TEXTS[i % 3][: 3 + 2 * i]).input_ids for i in range(6)]
    share = slice(rank * 6 // world, (rank + 1) * 6 // world)
    for iteration in range(2):
        generator = torch.Generator().manual_seed(iteration)
        responses = [torch.randint(1, 300, (1 + i,), generator=generator) for i in range(6)]  # ragged
        scores = [float(i + iteration) for i in range(6)]
        queries = [torch.tensor(ids) for ids in prompts]
        metrics = trainer.step(queries[share], responses[share], scores[share])
    weights = {name: p.detach().clone() for name, p in trainer.model.trainable_parameters()}
    trainer.train()  # the third iteration samples: ranks must draw different samples and not hang
    if trainer.accelerator.is_main_process:
        logged = {k: v for k, v in metrics.items() if "second" not in k}
        torch.save(
            {"world": world, "weights": weights, "metrics": logged, "kl_coef": trainer.state.kl_coef},
            f"{folder}/out.pt",
        )


if __name__ == "__main__":
    main(sys.argv[1])
