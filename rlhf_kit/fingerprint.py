"""Digests that tell one thing from another without keeping either."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

SAMPLES = 64  # elements of each tensor that enter a digest


def digest(text: str) -> str:
    """SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of name, shape, dtype and some elements of each tensor; tensors sharded by FSDP2 are seen whole."""
    parts = []
    for name, p in named:
        whole = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        flat = whole.flatten()
        count = min(SAMPLES, len(flat))
        places = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)  # first to last
        parts.append(f"{name} {tuple(p.shape)} {p.dtype} {flat[places].float().tolist()}")
    return digest("\n".join(parts))
