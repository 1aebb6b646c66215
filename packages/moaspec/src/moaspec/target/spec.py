"""What a target's config and tokenizer say of it, without its weights."""

import hashlib
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from moaspec.target import families
from moaspec_core.checkpoint.drafter_config import TargetIdentity
from moaspec_core.sampling.generation_defaults import GenerationDefaults


class TargetSpec:
    """A target without its weights.

    Args:
        config: transformers' own configuration object.
        tokenizer: transformers' tokenizer, or None where only token ids are used.
        name: how messages call it.
        dtype: of weights, keys and values; None where a subclass has the weights.
        generation_config: transformers' own, or None.
        device: of keys and values.
        quantize: format to which weights were rounded ("int8", "int4"), or "inputs" where those of
            linear layers are rounded, which makes this another target; None for neither.

    Attributes:
        adapter: hash of the adapter in its weights, which makes this another target; or None.
        state_bytes: of one text's recurrent and convolution states; 0 if layers have none.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        dtype: torch.dtype | None,
        generation_config: Any = None,
        device: str = "cpu",
        quantize: str | None = None,
    ) -> None:
        self.config, self.tokenizer, self.name = config, tokenizer, name
        self._dtype, self._generation_config = dtype, generation_config
        self._device, self.quantize = torch.device(device), quantize
        self.adapter: str | None = None
        self.state_bytes = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, keys and values."""
        assert self._dtype is not None
        return self._dtype

    @property
    def precision(self) -> str:
        """Dtype and quantisation in words; texts and costs of different ones are not compared."""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.quantize == "inputs":
            return f"{dtype}, inputs in 8 bits"
        return dtype if self.quantize is None else f"{dtype}, {self.quantize} weights"

    @property
    def device(self) -> torch.device:
        return self._device

    @cached_property
    def num_layers(self) -> int:
        """L, the number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @cached_property
    def draft_head_dim(self) -> int:
        """Size of the heads of a new drafter's SA and CA."""
        return self.head_dim

    @cached_property
    def num_reusable_layers(self) -> int:
        """How many of the last layers a drafter may reuse (N)."""
        return self.num_layers

    @property
    def vocab_size(self) -> int:
        """V, the size of the vocabulary."""
        return int(self.config.vocab_size)

    @cached_property
    def max_positions(self) -> int:
        """The context length, in tokens."""
        return families.context_length(self.config)

    @cached_property
    def rope_switches(self) -> tuple[int, ...]:
        """Lengths beyond which the keys of a whole text change (LongRoPE), ascending.

        Keys cached before must be computed again from the text's start, as Hugging Face's
        `generate` does for Phi-3. (For other families it continues with mixed keys, so the
        text depends on the prompt's length; here it never does.)
        """
        return families.rope_switches(self.config)

    @cached_property
    def rope_growth(self) -> int | None:
        """Tokens beyond which keys depend on the length of the prompt (dynamic NTK), or None."""
        return families.rope_growth(self.config)

    @cached_property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer."""
        return int(self.config.num_key_value_heads)

    @cached_property
    def head_dim(self) -> int:
        """D, the size of a head."""
        explicit = getattr(self.config, "head_dim", None)
        return int(explicit or self.config.hidden_size // self.config.num_attention_heads)

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end a turn: those of the generation config, else of the model config."""
        ids = getattr(self._generation_config, "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        if ids is None:
            return frozenset()
        # Some configurations say -1 where they mean none.
        return frozenset(one for one in ([ids] if isinstance(ids, int) else ids) if one >= 0)

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        return GenerationDefaults.of(self._generation_config, self.vocab_size)

    @cached_property
    def identity(self) -> TargetIdentity:
        """The record of this target in its drafters' checkpoints.

        Without a tokenizer, vocabularies are not compared.
        """
        return TargetIdentity(
            model_type=self.config.model_type,
            num_layers=self.num_layers,
            hidden_size=int(self.config.hidden_size),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            tokenizer_hash=_tokenizer_hash(self.tokenizer),
            adapter=self.adapter,
        )


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Identity of a vocabulary: SHA-256 over its sorted (token, id) pairs."""
    if tokenizer is None:
        return None
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{index}\0{token}\0".encode())
    return digest.hexdigest()
