"""Attention by a kernel, of at most a chunk of a prompt: bf16, on the CPU, without gradients.

Legend: B rows, T tokens, S slots, H query heads, J KV heads, D head dim.
"""

import ctypes

import torch
from torch import Tensor

from moaspec.backends.cpu.build import call, library, why_not
from moaspec.backends.cpu.structures import AttentionStruct
from moaspec.model.layers import masked_attention

MAX_QUERIES = 64  # tokens of a row, at most, in a call of a stack of layers
MAX_ATTENDED = 1024  # tokens, at most, in a pass over one text, and queries that `attend` takes
MAX_HEAD_DIM = 256
PAIR_LANES = 32  # elements of a head per instruction; D is a multiple of it


def fast_attention(
    query_BHTD: Tensor,
    key_BJSD: Tensor,
    value_BJSD: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """`masked_attention`, by `attend` where it is faster."""
    T, D = query_BHTD.shape[2:]
    causal = causal and T > 1
    if causal or not can_attend(query_BHTD, key_BJSD, value_BJSD, mask):
        return masked_attention(query_BHTD, key_BJSD, value_BJSD, mask, scale=scale, causal=causal)
    return attend(query_BHTD, key_BJSD, value_BJSD, mask, D**-0.5 if scale is None else scale)


def can_attend(
    query_BHTD: Tensor, key_BJSD: Tensor, value_BJSD: Tensor, mask: Tensor | None
) -> bool:
    """Whether `attend` supports these tensors and is faster than PyTorch."""
    dim = query_BHTD.shape[3]
    return (
        query_BHTD.dtype == key_BJSD.dtype == torch.bfloat16
        and query_BHTD.device.type == "cpu"
        and query_BHTD.shape[2] <= MAX_ATTENDED
        and query_BHTD.numel() > 0
        and key_BJSD.shape[2] > 0
        and dim % PAIR_LANES == 0
        and dim <= MAX_HEAD_DIM
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
        and query_BHTD.stride(3) == key_BJSD.stride(3) == value_BJSD.stride(3) == 1
        and not (
            torch.is_grad_enabled()
            and (query_BHTD.requires_grad or key_BJSD.requires_grad or value_BJSD.requires_grad)
        )
        and why_not() is None
    )


def attend(
    query_BHTD: Tensor, key_BJSD: Tensor, value_BJSD: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Grouped-query attention, as a (B, H, T, D) view of (B, T, H, D).

    A token's output has the same bits for any slots of the keys, if these are in the order of their
    tokens.

    Args:
        mask: (B or 1, 1, T or 1, S) bool, True: may attend; None: all may attend to all slots.
    """
    B, H, T, D = query_BHTD.shape
    J, S = key_BJSD.shape[1:3]
    out_BTHD = query_BHTD.new_empty((B, T, H, D))
    query_row, query_head, query_token, _ = query_BHTD.stride()
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    struct = AttentionStruct(
        query_BHTD.data_ptr(),
        key_BJSD.data_ptr(),
        value_BJSD.data_ptr(),
        None,
        None if mask is None else mask.data_ptr(),
        out_BTHD.data_ptr(),
        *(B, T, H, J, D, S),
        *(query_row, query_token, query_head),
        *key_BJSD.stride()[:3],
        *value_BJSD.stride()[:3],
        *mask_strides(mask),
        scale,
    )
    call(library().moaspec_attend, ctypes.byref(struct))
    return out_BTHD.transpose(1, 2)


def mask_strides(mask: Tensor | None) -> tuple[int, int]:
    """Strides of a mask's rows and of its tokens; 0 where all share one."""
    if mask is None:
        return 0, 0
    row, token = (0 if mask.shape[axis] == 1 else mask.stride(axis) for axis in (0, 2))
    return row, token
