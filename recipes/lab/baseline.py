"""Claim: subtracting a baseline leaves the policy gradient what it is on average, and makes it far less noisy.

The policy stands still; only the critic learns, for some iterations. Then the gradient of many small batches is taken
with three weights on the log-probs: the return, the return minus the critic's value, the return minus the mean of the
batch without the row itself. Every story scores 5 more than it deserves: a raw return then praises everything.

    python recipes/lab/baseline.py

Time:         about a minute on 2 CPU cores.
Expect:       variances that differ by a factor of ten or more, and means that agree within their standard errors.
Change first: OFFSET, BATCHES.
"""

import contextlib
import io
import random
import tempfile
import warnings

import torch
from tiny_language import arguments, ends_well, figure, make_trainer, opening, save

from rlhf_kit.functional import token_logprobs

OFFSET, ROWS = 5.0, 32
KINDS = ("return", "minus the critic's value", "minus the mean of the others")


def shifted(completions: list[str], **kwargs: object) -> list[float]:
    return [OFFSET + score for score in ends_well(completions)]


def gradients(trainer, rng: random.Random) -> torch.Tensor:
    """Policy gradients of one batch, one row per kind of weight, flattened."""
    tokenizer, model = trainer.processing_class, trainer.model
    prompts = [tokenizer(opening(rng), return_tensors="pt")["input_ids"][0] for _ in range(ROWS)]  # all of 3 tokens
    completions = trainer.generate(prompts)
    scores = torch.tensor(shifted([tokenizer.decode(c, skip_special_tokens=True) for c in completions]))  # (B,)
    width = max(map(len, completions))
    ids = torch.stack([torch.nn.functional.pad(c, (0, width - len(c))) for c in completions])  # (B, T)
    mask = torch.stack([torch.arange(width) < len(c) for c in completions])
    inputs = torch.cat([torch.stack(prompts), ids], dim=1)
    attention = torch.cat([torch.ones(ROWS, len(prompts[0]), dtype=torch.bool), mask], dim=1).long()
    logits, values = model.score(inputs, attention, completion_length=width)
    logprobs = token_logprobs(logits, ids)
    others = (scores.sum() - scores) / (ROWS - 1)
    weights = (
        scores[:, None].expand_as(ids),
        scores[:, None] - values.detach(),
        (scores - others)[:, None].expand_as(ids),
    )
    parameters = [p for name, p in model.trainable_parameters() if "v_head" not in name]
    found = []
    for weight in weights:
        objective = (torch.where(mask, weight * logprobs, 0)).sum() / ROWS
        grads = torch.autograd.grad(objective, parameters, retain_graph=True, allow_unused=True)
        found.append(torch.cat([g.flatten() for g in grads if g is not None]))
    return torch.stack(found)


def main() -> None:
    options = arguments(seeds=100, iterations=80)  # seeds: batches
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"learning_rate": 0.0, "kl_coef": 0.0, "num_iterations": options.iterations}
        trainer = make_trainer(shifted, f"{folder}/run", value_clip_range=None, **settings)
        trainer.train()
    rng = random.Random(2)
    samples = torch.stack(
        [gradients(trainer, rng) for _ in range(options.seeds)]
    ).double()  # (batches, kinds, weights)
    means, variances = samples.mean(0), samples.var(0).sum(-1)  # (kinds, weights), (kinds,)
    differences = samples - samples[:, -1:]
    distance = differences.mean(0).norm(dim=-1)
    error = (differences.var(0).sum(-1) / len(samples)).sqrt()
    rows = [
        [
            "weight of a log-prob",
            "variance of the gradient",
            "norm of its mean",
            "distance of the mean to the last",
            "of which chance",
        ]
    ]
    for i, kind in enumerate(KINDS):
        rows.append([kind, f"{variances[i]:.3f}", f"{means[i].norm():.3f}", f"{distance[i]:.3f}", f"{error[i]:.3f}"])
    picture, (axes,) = figure("variance of the gradient of one batch")
    axes.bar(KINDS, variances.tolist(), color=["tab:red", "tab:green", "tab:blue"])
    axes.set_xlabel("")
    axes.set_yscale("log")
    axes.tick_params(axis="x", labelsize=7)
    results = {kind: {"variance": float(v), "distance": float(d), "chance": float(e)}
               for kind, v, d, e in zip(KINDS, variances, distance, error, strict=True)}  # fmt: skip
    save("baseline", picture, rows, results)


if __name__ == "__main__":
    main()
