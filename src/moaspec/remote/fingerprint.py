"""Which drafter this is, so that a device and a server find out that theirs differ."""

from __future__ import annotations

import hashlib

import torch

from moaspec.model import MoADrafter
from moaspec.model.checkpoint import DRAFT_TOKENS, published_tensors


def fingerprint(drafter: MoADrafter) -> str:
    """SHA-256 over a drafter's weights as bf16, under their published names, and its vocabulary.

    Rounded to bf16, so that a server that computes in float32 and a bundle that was made in bf16
    find the same. Weights that were cast to float16 before may round otherwise.
    """
    tensors = published_tensors(drafter, torch.bfloat16)
    if drafter.draft_token_ids is not None:
        tensors[DRAFT_TOKENS] = drafter.draft_token_ids.cpu()
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
