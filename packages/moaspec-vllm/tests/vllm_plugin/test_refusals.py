"""Settings and drafters that cannot work, each with its reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from moaspec.model.moa import MoADrafter
from moaspec_core.errors import MismatchError, ServingError, UnsupportedTargetError
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config
from moaspec_vllm.refusals import check_drafter, check_settings
from moaspec_vllm.vllm_settings import SCHEDULER, WORKER


def settings(**changes: Any) -> Any:
    """The parts of vLLM's configuration that are looked at, with some changed."""
    values: dict[str, Any] = {
        "parallel_config.worker_cls": WORKER,
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.decode_context_parallel_size": 1,
        "parallel_config.prefill_context_parallel_size": 1,
        "scheduler_config.scheduler_cls": SCHEDULER,
        "model_config.use_mla": False,
        "model_config.logits_processors": None,
        "model_config.hf_config": tiny.target().config,
        "model_config.model": "tiny",
        "cache_config.cache_dtype": "auto",
    }
    config = SimpleNamespace(kv_transfer_config=changes.pop("kv_transfer_config", None))
    for path, value in (values | changes).items():
        section, name = path.split(".")
        vars(config).setdefault(section, SimpleNamespace())
        setattr(getattr(config, section), name, value)
    return config


def test_plain_settings_pass() -> None:
    check_settings(settings())


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("parallel_config.worker_cls", "auto", "add --worker-cls"),
        ("scheduler_config.scheduler_cls", None, "add --scheduler-cls"),
        ("model_config.use_mla", True, "MLA"),
        ("cache_config.cache_dtype", "fp8", "quantised"),
        ("model_config.logits_processors", ["pkg:Mine"], "logits processors"),
        ("parallel_config.pipeline_parallel_size", 2, "tensor parallelism"),
        ("parallel_config.decode_context_parallel_size", 2, "context parallelism"),
        ("kv_transfer_config", object(), "KV connector"),
    ],
)
def test_settings_that_cannot_work(path: str, value: Any, reason: str) -> None:
    with pytest.raises(ServingError, match=reason):
        check_settings(settings(**{path: value}))


def test_targets_of_no_family() -> None:
    config = SimpleNamespace(model_type="deepseek_v3")
    with pytest.raises(UnsupportedTargetError, match="models of these families"):
        check_settings(settings(**{"model_config.hf_config": config}))


def test_drafters_that_reuse_target_layers() -> None:
    sizes = drafter_config(tiny.target(), DrafterSizes(), (1, 3))
    with pytest.raises(MismatchError, match="num_target_layers 1, 3"):
        check_drafter(MoADrafter(sizes))
    check_drafter(MoADrafter(drafter_config(tiny.target(), DrafterSizes(), (0, 1))))


def test_drafters_without_cross_attention() -> None:
    sizes = drafter_config(tiny.target(), DrafterSizes(without=("ca",)))
    with pytest.raises(MismatchError, match="without cross-attention"):
        check_drafter(MoADrafter(sizes))


def test_drafters_of_long_rope_targets() -> None:
    with pytest.raises(MismatchError, match="LongRoPE"):
        check_drafter(tiny.random_drafter(tiny.target("phi3")))
