"""Tiny random targets, and drafters that disagree or agree with them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from block_drafts import block_logits
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.backends.fast_target import FastDecoderLayers
from moaspec.drafting.other_proposers.oracle_proposer import OracleProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import RequestText, VerifyRequest
from moaspec_core.engine.engine import Engine, run_now
from moaspec_core.sampling.params import GREEDY, SamplingParams
from moaspec_train.data_order import random_blocks
from moaspec_train.dataset.examples import Example, collate
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config

VOCAB = 64
WINDOW = 8
"""Sliding windows, shorter than every text here with its continuation."""
SWITCH = 16
"""Tokens after which Phi-3 has other rotary embeddings; all of PROMPTS start below it."""
NEW_TOKENS = 24
PROMPTS = ((5, 9, 2), (7, 1, 30, 44, 8, 12, 3), (1, 2, 3, 4, 5, 6, 60, 61, 62, 63, 20, 21), (33, 0))
TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
"""float32 sums in another order: values of these models are near 1, their layers few."""

_MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}),
    "gemma3_text": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 10,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "query_pre_attn_scalar": 14,
            "final_logit_softcapping": 4.0,
        },
    ),
    "phi3": (
        Phi3Config,
        Phi3ForCausalLM,
        {
            "original_max_position_embeddings": SWITCH,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.2],
                "long_factor": [3.0, 6.0],
            },
        },
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
}
"""Config, model, and what makes the family special."""
FAMILIES = tuple(_MODELS)


def model(family: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """A random model of transformers; its weights are large, so that its text varies."""
    config_class, model_class, special = _MODELS[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    made = model_class(config_class(**copy.deepcopy(settings | special | changes)))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@functools.cache
def target(family: str = "llama") -> Target:
    """The tiny target that most tests share; nobody changes it."""
    return Target(model(family), None, name=f"tiny-{family}")


def fresh_target(family: str = "llama", *, tokenizer: Any = None, **changes: Any) -> Target:
    """A target of a test's own."""
    return Target(model(family, **changes), tokenizer, name=f"tiny-{family}")


def fast_layers(target: Target) -> FastDecoderLayers:
    """The layers of an accelerated target."""
    assert isinstance(target.layers, FastDecoderLayers)
    return target.layers


def kernel_target(family: str = "llama", *, dtype: torch.dtype = torch.bfloat16) -> Target:
    """One of sizes that `moaspec.backends.cpu` takes, not packed."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 32,
    }
    if family == "phi3":
        rope = copy.deepcopy(_MODELS[family][2]["rope_parameters"])
        # A factor for each frequency; larger heads have more.
        rope |= {"short_factor": [1.0, 1.2] * 4, "long_factor": [3.0, 6.0] * 4}
        # Its heads are always as wide together as its states.
        sizes |= {"rope_parameters": rope, "num_attention_heads": 2, "num_key_value_heads": 1}
    made = fresh_target(family, **sizes)
    made.model.to(dtype)
    return made


def tokenizer() -> Any:
    """One word per id: w0 ... w63."""
    words = {f"w{i}": i for i in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")


def random_drafter(
    of: Target,
    *,
    seed: int = 1,
    draft_token_ids: Tensor | None = None,
    exits: tuple[int, ...] = (0,),
    **sizes: Any,
) -> MoADrafter:
    """A drafter that disagrees: random weights."""
    torch.manual_seed(seed)
    drafter = MoADrafter(drafter_config(of, DrafterSizes(**sizes), exits), draft_token_ids)
    return drafter.eval().requires_grad_(requires_grad=False)


def own_text(of: Target, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """What transformers' own greedy `generate` writes."""
    ids = torch.tensor([list(prompt)])
    output = of.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    return [int(token) for token in output[0, len(prompt) :]]


@functools.cache
def own_texts(family: str) -> tuple[tuple[int, ...], ...]:
    """The shared target's continuation of each of PROMPTS."""
    return tuple(tuple(own_text(target(family), prompt)) for prompt in PROMPTS)


@functools.cache
def agreeing_drafter(family: str, num_target_layers: int = 0) -> MoADrafter:
    """A drafter that has learned the shared target's continuations of PROMPTS by heart."""
    return taught_drafter(target(family), own_texts(family), num_target_layers)


def taught_drafter(
    of: Target, texts: Sequence[Sequence[int]], num_target_layers: int = 0, **sizes: Any
) -> MoADrafter:
    """A drafter that has learned these continuations of PROMPTS by heart."""
    examples = [Example(p, tuple(t)) for p, t in zip(PROMPTS, texts, strict=True)]
    return trained_drafter(of, examples, steps=100, num_target_layers=num_target_layers, **sizes)


def trained_drafter(
    of: Target,
    examples: Sequence[Example],
    *,
    steps: int,
    num_target_layers: int = 0,
    **sizes: Any,
) -> MoADrafter:
    """A drafter trained on these examples for this many passes."""
    drafter = random_drafter(of, **sizes).train().requires_grad_(requires_grad=True)
    batch = collate(examples, range(len(examples)))
    labels_BT = batch.input_ids_BT.roll(-1, dims=1)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    for _ in range(steps):
        blocks = random_blocks(batch, shortest=3, longest=7, generator=generator)
        logits_BTV = block_logits(
            drafter,
            of,
            batch.input_ids_BT,
            batch.attention_mask_BT,
            blocks.last_verified_BT,
            num_target_layers=num_target_layers,
        )
        optimizer.zero_grad()
        F.cross_entropy(logits_BTV[blocks.loss_BT], labels_BT[blocks.loss_BT]).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter.eval().requires_grad_(requires_grad=False)


class ReplayDrafting(OracleProposer):
    """`OracleProposer` that remembers which rows were closed.

    Args:
        texts: whole texts, prompts included.
        wrong_from: depth from which on all proposals are wrong.
    """

    def __init__(self, texts: Sequence[Sequence[int]], *, wrong_from: int | None = None) -> None:
        agreement = 1.0 if wrong_from is None else [*[1.0] * (wrong_from - 1), 0.0]
        super().__init__(texts, agreement=agreement)
        self.closed: list[int] = []

    def close(self, row: int) -> None:
        self.closed.append(row)


def draft(
    target: Target,
    drafter: MoADrafter,
    prompt: tuple[int, ...],
    shape: Tree,
    *,
    num_target_layers: int = 0,
    sampling: SamplingParams = GREEDY,
) -> tuple[list[int], DraftTree]:
    """The text up to the root, and the first round's tree."""
    drafting = FastMoAProposer(drafter, target, num_target_layers=num_target_layers)
    verifier = LocalVerifier(target, drafting)
    drafting.share_target_cache(verifier.cache)
    (verdict,) = run_now(verifier.verify([VerifyRequest(0, 0, prompt)]))
    if verdict.features is not None:
        drafting.append_features(0, verdict.features)
    text = [*prompt, verdict.next_token]
    (tree,) = drafting.propose([RequestText(0, text, sampling)], shape)
    return text, tree


def replay_engine(of: Target, drafting: ReplayDrafting) -> Engine:
    """An engine whose drafter is a stub."""
    return Engine(
        LocalVerifier(of, drafting),
        drafting,
        target=of,
    )
