"""The names and arguments of vLLM's second runner that `docs/vllm.md` builds on.

The source is read, because importing it needs Triton for a GPU.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = pytest.mark.filterwarnings("default")

RUNNER = Path(vllm.__file__).parent / "v1" / "worker" / "gpu"


def functions(name: str) -> dict[str, list[str]]:
    """Arguments of each function and method in a file of the runner."""
    tree = ast.parse((RUNNER / name).read_text())
    return {
        one.name: [argument.arg for argument in one.args.args]
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef)
    }


def test_a_speculator_is_asked_what_the_page_says() -> None:
    assert functions("spec_decode/__init__.py")["init_speculator"] == [
        "vllm_config",
        "device",
        "req_states",
    ]
    asked = functions("spec_decode/speculator.py")
    assert asked["load_model"] == ["self", "target_model"]
    assert asked["init_cudagraph_manager"] == ["self", "cudagraph_mode"]
    assert asked["capture"] == ["self"]
    assert asked["set_attn"][1:] == [
        "model_state",
        "kv_cache_config",
        "block_tables",
        "target_input_buffers",
        "target_attn_groups",
    ]
    needed = {"input_batch", "attn_metadata", "slot_mappings", "num_sampled", "num_rejected"}
    assert needed | {"last_sampled", "num_speculative_tokens"} <= set(asked["propose"])


def test_the_runner_reads_what_the_page_says() -> None:
    tree = ast.parse((RUNNER / "model_runner.py").read_text())
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "speculator"
    }
    assert {"draft_attn_layer_names", "dcp_size", "supports_mm_inputs", "set_attn"} <= read
    assert {"load_model", "init_cudagraph_manager", "capture", "propose"} <= read
    imported = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert "init_speculator" in imported  # so it is bound as a global of this module
    # What is asked of a `DraftModelSpeculator` only.
    guards = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "DraftModelSpeculator" in ast.unparse(node.test)
    ]
    guarded = {
        node.attr
        for guard in guards
        for node in ast.walk(guard)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.speculator"
    }
    assert {"load_model", "set_attn", "draft_attn_layer_names"} <= guarded
    scheduled = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "scheduler_output"
    }
    assert "num_spec_tokens_to_schedule" in scheduled


def test_custom_classes_keep_vllm_on_its_first_runner() -> None:
    from types import SimpleNamespace

    from vllm.config import VllmConfig

    from moaspec_core.errors import ServingError
    from moaspec_vllm.vllm_worker import MoAWorker

    config = VllmConfig()
    config.speculative_config = SimpleNamespace(method="custom_class", parallel_drafting=False)
    assert config._get_v2_model_runner_unsupported_features() == [
        "speculative method 'custom_class'"
    ]
    worker = MoAWorker.__new__(MoAWorker)
    worker.use_v2_model_runner = True
    with pytest.raises(ServingError, match="VLLM_USE_V2_MODEL_RUNNER"):
        worker.init_device()
