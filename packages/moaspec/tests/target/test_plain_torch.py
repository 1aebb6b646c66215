"""What callers set for all of torch changes no text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import moaspec
import tiny
from moaspec.backends.fast_target import accelerate
from moaspec.target import registry
from moaspec.target.target import Target, plain_torch

PROMPT = tiny.PROMPTS[1]
NEW_TOKENS = 8


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
    "autocast to float16": partial(torch.autocast, "cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "bfloat16 by default": partial(_default_dtype, torch.bfloat16),
    "float64 by default": partial(_default_dtype, torch.float64),
    "another device by default": partial(_default_device, "meta"),
    "a device context": partial(torch.device, "meta"),
    "deterministic algorithms": _deterministic,
}


def _target(dtype: torch.dtype) -> Target:
    made = tiny.kernel_target(dtype=dtype)
    accelerate(made)
    return made


def _streamed(target: Target, **options: Any) -> list[int]:
    events = moaspec.stream(target, PROMPT, max_new_tokens=NEW_TOKENS, **options)
    return [token for event in events for token in event.token_ids]


def _in_session(target: Target, drafter: Any) -> list[int]:
    session = moaspec.Session(target, drafter)
    first = session.generate(PROMPT, max_new_tokens=NEW_TOKENS).token_ids
    return session.generate([*PROMPT, *first, 5], max_new_tokens=NEW_TOKENS).token_ids


CASES = [
    (name, dtype)
    for name in SURROUNDINGS
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if dtype == torch.float32 or "autocast" in name or "by default" in name
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_texts_are_the_same(name: str, dtype: torch.dtype) -> None:
    target = _target(dtype)
    drafter = tiny.random_drafter(target).to(dtype)
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 4, "drafter": drafter}
    expected = [
        _streamed(target, drafter=drafter),
        _streamed(target, **sampled),
        _in_session(target, drafter),
    ]
    fresh = _target(dtype)
    with SURROUNDINGS[name]():
        found = [
            _streamed(fresh, drafter=drafter),
            _streamed(fresh, **sampled),
            _in_session(fresh, drafter),
        ]
    assert found == expected


@pytest.mark.parametrize("name", [name for name in SURROUNDINGS if "device" not in name])
def test_the_hook_too(name: str) -> None:
    """A default device is transformers' own business before it calls the hook."""
    model = tiny.model("llama").eval()
    ids = torch.tensor([PROMPT])
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS}
    expected = model.generate(**asked, do_sample=False)
    with SURROUNDINGS[name]():
        found = model.generate(**asked, do_sample=False, custom_generate=moaspec.custom_generate())
    assert found.tolist() == expected.tolist()


def test_a_model_that_another_thread_loads_changes_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dtype is the default one meanwhile; what began meanwhile would restore that."""
    tiny.model("llama").save_pretrained(tmp_path)
    loading, read = threading.Event(), registry._auto_class

    class Slow:
        def from_pretrained(self, *args: Any, **options: Any) -> Any:
            with _default_dtype(torch.bfloat16):
                loading.set()
                time.sleep(0.3)
                return read(options["config"]).from_pretrained(*args, **options)

    monkeypatch.setattr(registry, "_auto_class", lambda _: Slow())
    with ThreadPoolExecutor(3) as pool:
        loaded = [pool.submit(moaspec.load_target, tmp_path, dtype="bfloat16") for _ in range(2)]
        assert loading.wait(60)
        with plain_torch():
            inside = torch.get_default_dtype()
        assert all(one.result().dtype == torch.bfloat16 for one in loaded)
    assert inside == torch.get_default_dtype() == torch.float32
