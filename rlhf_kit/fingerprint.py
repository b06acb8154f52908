"""Digests that tell one thing from another without keeping either."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

SAMPLES = 64  # elements of each tensor that enter a digest, besides the sum of all of its bytes


def digest(text: str) -> str:
    """SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of name, shape, dtype, some elements and a checksum of each tensor; sharded ones are seen whole."""
    parts = []
    for name, p in named:
        whole = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        flat = whole.flatten()
        count = min(SAMPLES, len(flat))
        places = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)  # first to last
        parts.append(f"{name} {tuple(p.shape)} {p.dtype} {flat[places].float().tolist()} {_checksum(flat)}")
    return digest("\n".join(parts))


def _checksum(flat: Tensor) -> int:
    """Sum of the bits as integers, wrapping around: the same on every device and in every order."""
    data = flat.contiguous().view(torch.uint8)
    whole = len(data) // 8 * 8
    if data.storage_offset() % 8:
        data = data.clone()
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())
