"""Log-probabilities and entropy of a categorical policy, from its logits.

Log-softmax is always taken in float32 (or float64), whatever the model computes in: in bfloat16 a log-probability
carries about two digits. Left out on purpose: anything that knows where the logits come from.
"""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log pi(token) under softmax(logits / temperature).

    Args:
        logits: (..., V) any float dtype; carries the gradient.
        token_ids: (...) int64 in [0, V).
        temperature: > 0, the one the token was sampled with.

    Returns:
        (...) float32 (float64 for float64 logits), nats.

    Raises:
        ValueError: temperature <= 0, or shapes do not fit.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}.")
    if token_ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"token_ids must have shape {tuple(logits.shape[:-1])} to match logits {tuple(logits.shape)}, "
            f"got {tuple(token_ids.shape)}."
        )
    scaled = logits if logits.dtype == torch.float64 else logits.float()  # (..., V)
    if temperature != 1:
        scaled = scaled / temperature
    # log_softmax would keep a second (..., V) tensor for the backward pass.
    chosen = scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)  # (...)
    return chosen - scaled.logsumexp(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits): -sum_x p(x) log p(x).

    Args:
        logits: (..., V) any float dtype, divided by the temperature already; carries the gradient.

    Returns:
        (...) float32 (float64 for float64 logits), nats, in [0, log V]. A token of probability 0 contributes 0.
    """
    logprobs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)  # (..., V)
    return -(logprobs.exp() * torch.where(logprobs > -torch.inf, logprobs, 0)).sum(-1)
