"""Numbers measured on the authors' code; `golden_data/README.md` defines them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target

ROOT = Path(__file__).parent / "golden_data" / "llama"

needs_golden = pytest.mark.skipif(not ROOT.exists(), reason="golden_data/ was left out")
TOLERANCE: dict[str, Any] = {
    "atol": 1e-4,
    "rtol": 1e-4,
}  # float32 sums in another order; see the golden README


def arrays(name: str) -> dict[str, Tensor]:
    with np.load(ROOT / name) as file:
        return {key: torch.from_numpy(np.asarray(file[key])) for key in file}


def target() -> Target:
    settings: dict[str, Any] = json.loads((ROOT / "config.json").read_text())["target"]
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(load_file(ROOT / "target.safetensors"))
    return Target(model, None, name="golden-llama")


def raw_checkpoint(directory: Path, weights: str) -> Path:
    """A directory as the reference saves it: the target's config and the drafter's tensors."""
    settings = json.loads((ROOT / "config.json").read_text())["target"]
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(load_file(ROOT / weights), directory / "model.safetensors")
    return directory


def drafter(
    directory: Path, of: Target, weights: str = "drafter_trained.safetensors"
) -> MoADrafter:
    return load_checkpoint(raw_checkpoint(directory, weights), of.identity, of.config)
