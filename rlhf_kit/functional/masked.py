"""Sums, means and variances over the positions a mask keeps.

A mask says what it KEEPS: True (or 1) is a real token, False is padding. Whatever stands in padding, NaN and infinity
included, changes neither the result nor a gradient, because it is replaced before any arithmetic. An empty mask gives
0, never NaN.

Left out on purpose: unmasked versions (torch has them) and reductions over several processes (pass tensors that
already hold the rows of all of them).
"""

import torch
from torch import Tensor

WHITEN_EPS = 1e-8  # added to the variance, in the squared unit of x


def _keep(x: Tensor, mask: Tensor) -> Tensor:
    if mask.shape != x.shape:
        raise ValueError(
            f"x has shape {tuple(x.shape)} but its mask has shape {tuple(mask.shape)}; they must be equal."
        )
    return mask.bool()


def _centred(x: Tensor, mask: Tensor) -> Tensor:
    """x less the mean of its kept elements; 0 elsewhere."""
    keep = _keep(x, mask)
    for _ in range(2):  # the first mean is off by rounding, which matters when x is nearly constant
        x = torch.where(keep, x - masked_mean(x, mask), torch.zeros_like(x))
    return x


def masked_sum(x: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Sum of the kept elements.

    Args:
        x: (...) any real dtype; may hold anything where the mask is False.
        mask: (...) same shape, True = keep.
        dim: axis to reduce; None = all of them.

    Returns:
        () if `dim` is None, else x.shape without axis `dim`. 0 where nothing is kept.

    Raises:
        ValueError: the shapes differ.
    """
    kept = torch.where(_keep(x, mask), x, torch.zeros_like(x))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Mean of the kept elements, 0 where nothing is kept.

    Args:
        x: (...) floating point; may hold anything where the mask is False.
        mask: (...) same shape, True = keep.
        dim: axis to reduce; None = all of them.

    Returns:
        () if `dim` is None, else x.shape without axis `dim`.

    Raises:
        ValueError: the shapes differ.
    """
    keep = _keep(x, mask)
    count = keep.sum() if dim is None else keep.sum(dim)
    return masked_sum(x, mask, dim=dim) / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Biased variance of the kept elements (divided by their number n, not n - 1).

    Args:
        x: (...) floating point; may hold anything where the mask is False.
        mask: (...) same shape, True = keep.

    Returns:
        () in the squared unit of x; 0 for one element or none.

    Raises:
        ValueError: the shapes differ.
    """
    return masked_mean(_centred(x, mask).square(), mask)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Centre and scale the kept elements: (x - mean) / sqrt(var + 1e-8), with the biased variance.

    Args:
        x: (...) floating point; may hold anything where the mask is False.
        mask: (...) same shape, True = keep.

    Returns:
        (...) mean 0 and variance 1 over the kept elements, exactly 0 elsewhere. One kept element gives 0.

    Raises:
        ValueError: the shapes differ.

    Source: advantage normalisation, Andrychowicz et al. 2021, choice C67 (arXiv:2006.05990).
    """
    return _centred(x, mask) * torch.rsqrt(masked_var(x, mask) + WHITEN_EPS)
