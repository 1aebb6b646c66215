"""What a request may ask for beside a text: LoRA adapters, structured output, log-probabilities."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny
import vllm_serving as serving

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

RANK = 4
REGEX = r"(w1|w5|w7)(w9|w2|w4)+"
ADAPTED = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "up_proj": "mlp"}


def write_adapter(models: serving.Models, path: Path, seed: int) -> None:
    """A random LoRA adapter in peft's form that changes texts."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in models.target.model.named_modules():
        if name.rpartition(".")[2] in ADAPTED:
            out, size = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(
                RANK, size, generator=generator
            )
            tensors[f"base_model.model.{name}.lora_B.weight"] = (
                torch.randn(out, RANK, generator=generator) / 2
            )
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*ADAPTED]}
    (path / "adapter_config.json").write_text(json.dumps(config))


def answers(llm: Any, adapters: Sequence[Path]) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Token ids and log-probabilities for all prompts, adapters and options, in one batch."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    loras = [None, *(LoRARequest(one.name, 1 + i, str(one)) for i, one in enumerate(adapters))]
    asked = [
        (lora, {"temperature": 0, "max_tokens": tiny.NEW_TOKENS, "ignore_eos": True, **options})
        for lora in loras
        for options in (
            {},
            {"logprobs": 3},
            {"structured_outputs": StructuredOutputsParams(regex=REGEX), "logprobs": 2},
        )
    ]
    every = [(list(prompt), *one) for prompt in tiny.PROMPTS for one in asked]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, *_ in every],
        [SamplingParams(**options) for *_, options in every],
        lora_request=[lora for _, lora, _ in every],
        use_tqdm=False,
    )
    return [
        (
            list(one.outputs[0].token_ids),
            [{k: v.logprob for k, v in token.items()} for token in one.outputs[0].logprobs or ()],
        )
        for one in outputs
    ]


def test_adapters_structure_and_logprobs_are_plain_vllms(tmp_path: Path) -> None:
    from moaspec_vllm.proposer import FAILURES

    models = serving.write_models(tmp_path)
    adapters = [tmp_path / "first", tmp_path / "second"]
    for seed, path in enumerate(adapters):
        write_adapter(models, path, seed)
    # vLLM 0.32.0 on CPUs: requests without an adapter get that of the last slot, here an empty one.
    changes = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    with serving.engine(models, None, **changes) as plain:
        expected = answers(plain, adapters)
    before = FAILURES._value.get()
    with serving.engine(models, models.taught, **changes) as llm:
        found = answers(llm, adapters)
        assert serving.counter(llm, "spec_decode_num_accepted_tokens") > 0
    # This one measures its costs.
    with serving.engine(models, models.taught, draft_up_to=None, **changes) as llm:
        assert [ids for ids, _ in answers(llm, adapters)] == [ids for ids, _ in expected]
    assert FAILURES._value.get() == before
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, own), (_, other) in zip(found, expected, strict=True):
        assert [token.keys() for token in own] == [token.keys() for token in other]
        # Sums of passes over one token and over several, in float32.
        assert all(
            token[key] == pytest.approx(there[key], abs=1e-4)
            for token, there in zip(own, other, strict=True)
            for key in token
        )
    base, first, second = (expected[3 * i][0] for i in range(3))
    assert base == tiny.own_text(models.target, tiny.PROMPTS[0])
    assert base != first != second != base
    for ids, _ in found[2::3]:
        assert re.fullmatch(REGEX, "".join(f"w{token}" for token in ids))
