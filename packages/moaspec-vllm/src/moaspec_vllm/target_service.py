"""The target of `moaspec target-server --engine vllm`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from moaspec_core.errors import InputError

if TYPE_CHECKING:
    from moaspec_core.cli.options import LoadOptions
    from moaspec_edge.server.service import ServiceOptions, TargetService


def vllm_service(
    asked: LoadOptions, limits: ServiceOptions, ranks: int, on_failure: Callable[[], None]
) -> TargetService:
    """The target inside vLLM, with the drafter's encoder only."""
    from moaspec_vllm.hooks import require_version

    require_version()
    # Standard output begins with our line.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    import torch

    from moaspec.backends.load import chosen_dtype
    from moaspec.generation.drafters import load_drafter
    from moaspec.target.registry import find_weights, read_target_spec
    from moaspec_edge.server.service import TargetService, wire_encoder
    from moaspec_vllm.paged_drafter.cache_reader import HeadShare
    from moaspec_vllm.vllm_settings import VLLMVerifierSettings
    from moaspec_vllm.vllm_verifier import VLLMVerifier

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = chosen_dtype(asked.dtype, device=device, packed=False)
    info = read_target_spec(asked.model, dtype=dtype, device=device, tokenizer=asked.tokenizer)
    if any(switch < limits.longest(info) for switch in info.rope_switches):
        raise InputError(
            f"{asked.model} has LongRoPE: all keys of a text change at {info.rope_switches[0]} "
            "tokens, which vLLM's cache cannot follow. Take --engine torch, or fewer --max-tokens."
        )
    module = None if asked.drafter is None else load_drafter(asked.drafter, target=info)
    HeadShare(total=info.num_kv_heads, ranks=ranks)  # raises if ranks do not divide the heads
    engine = VLLMVerifier(
        VLLMVerifierSettings(
            model=find_weights(asked.model),
            dtype=dtype,
            max_rows=limits.fitting(info).max_sessions,
            max_tokens=limits.longest(info),
            token_bytes=limits.token_bytes(info),
            num_kv_heads=info.num_kv_heads,
            tensor_parallel_size=ranks,
            features=module is not None,
        ),
        None if module is None else wire_encoder(module, info),
        on_failure=on_failure,
    )
    atexit.register(engine.shutdown)  # ranks that end now have not failed
    return TargetService(info, module, limits, engine=engine)
