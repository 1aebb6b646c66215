"""Loading a target that is as fast as this machine allows."""

from pathlib import Path
from typing import Literal

import torch

from moaspec.backends.cpu.build import must_compile, why_not
from moaspec.backends.fast_target import accelerate
from moaspec.backends.linear_backends import fastest_dtype
from moaspec.backends.rounded_inputs import INPUTS, require_inputs, round_inputs
from moaspec.backends.weight_only import quantise, require_quantize
from moaspec.target.registry import (
    read_chat_template,
    read_skeleton,
    read_target,
    replace_chat_template,
    require_device,
    require_dtype,
)
from moaspec.target.target import Target, plain_torch
from moaspec.target.thread_limiter import ThreadLimiter
from moaspec.target.weights.adapter import adapter_hash

AUTO_DTYPE = "auto"


@plain_torch()
def load_target(
    name: str | Path,
    *,
    dtype: str = AUTO_DTYPE,
    device: str = "cpu",
    packed: bool = True,
    quantize: str | None = None,
    adapter: str | Path | None = None,
    tokenizer: str | Path | None = None,
    chat_template: str | Path | None = None,
    generation_config: Literal["auto"] | None = "auto",
) -> Target:
    """Load a target.

    Args:
        name: an alias (`moaspec models` lists them), a directory, a GGUF file, or a hub id.
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 where it is faster on this
            device, else float32.
        device: a torch device.
        packed: accelerate it, see `moaspec.backends.fast_target.accelerate`. Without it the model
            is as transformers loads it, for training and comparisons.
        quantize: "int8" or "int4" rounds weights by torchao, see `backends.weight_only`. "inputs"
            rounds each 32 numbers that weights in a GGUF file's bits are multiplied with to 8 bits,
            see `backends.rounded_inputs`. This changes the target: its texts, with drafts or
            without, are those of the rounded target.
        adapter: directory of a LoRA adapter of peft, which is merged into the weights.
        tokenizer: directory with a tokenizer.json that is read in place of the target's own
            tokenizer, such as one in a GGUF file that is not known here.
        chat_template: file with a template in Jinja, for a model that has none or a wrong one.
        generation_config: "auto" keeps the defaults of the model's `generation_config.json`; None
            keeps only the ids that end a text.

    Returns:
        The frozen target, with transformers' own `tokenizer` and `config`.

    Raises:
        InputError: unknown dtype, a device that cannot be used here, a `quantize` or `adapter`
            where it cannot be done, no tokenizer in the directory, or a template that is not one.
        UnknownModelError: nothing of that name can be found or read, or its weights are not those
            of its config, or not finite.
        UnsupportedTargetError: a model that cannot be drafted for.
    """

    def read(chosen: str) -> Target:
        if quantize == INPUTS:
            require_inputs(dtype=chosen, device=device, packed=packed)
        elif quantize is not None:
            require_quantize(quantize, dtype=chosen, device=device)
        kernels_multiply = packed and chosen == "bfloat16" and (must_compile() or why_not() is None)
        return read_target(
            name,
            dtype=chosen,
            device=device,
            quantize=quantize,
            adapter=adapter,
            tokenizer=tokenizer,
            generation_config=generation_config,
            # Kernels keep these bits; other uses want ordinary weights.
            in_file_bits=on_cpu and (quantize == INPUTS or (quantize is None and kernels_multiply)),
        )

    require_device(device)
    template = None if chat_template is None else read_chat_template(Path(chat_template))
    on_cpu = torch.device(device).type == "cpu"
    if dtype == AUTO_DTYPE and packed and on_cpu and must_compile():
        # Kernels take half a minute to compile: what is wrong with the target is told before.
        target = read("bfloat16")
        chosen = chosen_dtype(dtype, device=device)
        if chosen != "bfloat16" or why_not() is not None:
            target = read(chosen)
    else:
        target = read(chosen_dtype(dtype, device=device, packed=packed))
    if quantize == INPUTS:
        round_inputs(target.model, name=target.name, packed=packed)
    elif quantize is not None:
        quantise(target.model, quantize, name=target.name, packed=packed)
    if template is not None:
        replace_chat_template(target, template, where=str(chat_template))
    target.threads = ThreadLimiter()
    if packed:
        accelerate(target)
    return target


def chosen_dtype(
    dtype: str,
    *,
    device: str = "cpu",
    packed: bool = True,
    model: str | Path | None = None,
    adapter: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> str:
    """Resolve "auto" to the faster dtype here, which may compile kernels for half a minute.

    Args:
        model, adapter, tokenizer: of the target. Its config and tokenizer, and the adapter, are
            read before kernels are compiled.

    Raises:
        InputError: an unknown dtype or device.
        UnknownModelError, UnsupportedTargetError: see `load_target`.
    """
    require_device(device)
    if dtype != AUTO_DTYPE:
        require_dtype(dtype, AUTO_DTYPE)
        return dtype
    if packed and must_compile():
        if adapter is not None:
            adapter_hash(adapter)
        if model is not None:
            read_skeleton(model, dtype="float32", tokenizer=tokenizer)
    return str(fastest_dtype(torch.device(device), packed=packed)).removeprefix("torch.")
