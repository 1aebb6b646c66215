"""The parts of a target that a device needs: embedding, head, and the last layers where reused.

Legend: V vocabulary, E hidden size, L target layers, N reused ones.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from moaspec.model.checkpoint.eight_bits import SCALE
from moaspec.model.checkpoint.weight_files import require_enough
from moaspec.target.decoder_layers import LMHead, frozen_linear
from moaspec.target.target import Target
from moaspec.target.weights.int8_rows import Int8Embedding, Int8Linear
from moaspec_core.errors import InputError, MismatchError

EMBEDDING, HEAD, NORM, LAYER = "embedding", "head", "norm", "layers"


def excerpt_tensors(
    target: Target, *, num_layers: int, head_token_ids: Tensor | None
) -> dict[str, Tensor]:
    """A target's embedding, head, final norm and last layers, by names of this file.

    Args:
        target: not packed.
        num_layers: N; with 0 the final norm is left out too.
        head_token_ids: rows of the head to keep, None for all. A head that is tied to the embedding
            is not repeated.
    """
    embedding, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    tensors = {f"{EMBEDDING}.weight": embedding.weight}
    if head.weight.data_ptr() != embedding.weight.data_ptr():
        rows = head if head_token_ids is None else target.lm_head.rows(head_token_ids)
        tensors |= {f"{HEAD}.{name}": tensor for name, tensor in rows.state_dict().items()}
    for index in range(num_layers):
        state = target.layer_state(target.num_layers - num_layers + index)
        tensors |= {f"{LAYER}.{index}.{name}": tensor for name, tensor in state.items()}
    if num_layers:
        norm = target.model.base_model.norm
        tensors |= {f"{NORM}.{name}": tensor for name, tensor in norm.state_dict().items()}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


class PartialTarget(Target):
    """The part of a target that drafting needs, from a few of its weights.

    It embeds tokens, runs the last N layers and computes logits of the tokens that can be drafted.
    It lacks the other layers, so it cannot verify.

    Args:
        config: transformers' config of the whole target.
        tensors: see `excerpt_tensors`; weights that have scales are in eight bits.
        num_layers: N.
        head_token_ids: the ids of the head's rows, None for all.
        generation_config: the target's; None where it is not known.

    Raises:
        KeyError, RuntimeError, ValueError, IndexError: weights are missing or have impossible
            shapes.
    """

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, Tensor],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        num_layers: int,
        head_token_ids: Tensor | None,
        stop_token_ids: frozenset[int],
        dtype: torch.dtype,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        model = _last_layers(config, tensors, num_layers, dtype)
        _fill(model, tensors, dtype)
        super().__init__(model, tokenizer, name=name)
        self.stop_token_ids, self._generation_config = stop_token_ids, generation_config
        self._compute_dtype = dtype
        if head_token_ids is not None or isinstance(self.lm_head.linear, Int8Linear):
            self.lm_head = PartialLMHead(self.lm_head, head_token_ids, name)

    @property
    def dtype(self) -> torch.dtype:
        """To compute in; weights may have fewer bits."""
        return self._compute_dtype

    @property
    def device(self) -> torch.device:
        return next(iter((*self.model.parameters(), *self.model.buffers()))).device

    def run(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by an InputError: it has no whole pass."""
        raise InputError(
            f"{self.name} holds a few of the target's layers and cannot verify; connect to a "
            "server, or load the target itself."
        )


class PartialLMHead(LMHead):
    """Some rows of an LM head, those of `token_ids`, or all of them in eight bits."""

    def __init__(self, head: LMHead, token_ids: Tensor | None, name: str) -> None:
        super().__init__(head.linear, head.cap, head.scale)
        self._token_ids, self._name = token_ids, name

    def select(self, token_ids: Tensor | None) -> nn.Module:
        """The head for the tokens that can be drafted; MismatchError where it has other rows."""
        kept = self._token_ids
        if token_ids is None or (kept is not None and torch.equal(kept, token_ids)):
            return self.linear
        if kept is not None:
            raise MismatchError(
                f"{self._name} holds {len(kept)} rows of the head, and they are not those of this "
                "draft vocabulary. Export it with the drafter that is used."
            )
        if isinstance(self.linear, Int8Linear):
            return self.linear.select(token_ids)
        return self.rows(token_ids)


class _Absent(nn.Module):
    """Stands in for a layer that was left out."""


def _last_layers(
    config: Any, tensors: Mapping[str, Tensor], num_layers: int, dtype: torch.dtype
) -> Any:
    """A model of this config with its last N layers only, whose weights are still random.

    Transformers builds it from a config of N layers and one token, and initialises few weights.
    """
    total = int(config.num_hidden_layers)
    small: dict[str, Any] = {"num_hidden_layers": num_layers, "vocab_size": 1}
    small |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    if getattr(config, "layer_types", None) is not None:
        small["layer_types"] = list(config.layer_types)[total - num_layers :]
    values = config.to_dict() | small | {"tie_word_embeddings": False}
    make = partial(
        AutoModelForCausalLM.from_config,
        AutoConfig.for_model(**values),
        dtype=dtype,
        attn_implementation="sdpa",
    )
    require_enough(tensors, make)
    model: Any = make()
    layers = list(model.base_model.layers)
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = total - num_layers + index
    absent = [_Absent() for _ in range(total - num_layers)]
    model.base_model.layers = nn.ModuleList([*absent, *layers])
    if not num_layers:
        model.base_model.norm = _Absent()
    config._attn_implementation = "sdpa"
    model.config = config
    return model


def _fill(model: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Put the weights into the model, tying the head to the embedding where it has none."""
    base = model.base_model
    groups = grouped(tensors)
    embedding = groups[EMBEDDING]
    if f"weight{SCALE}" in embedding:
        factor = float(getattr(base.embed_tokens, "embed_scale", 1.0))
        parts = embedding["weight"], embedding[f"weight{SCALE}"]
        base.embed_tokens = Int8Embedding(*parts, dtype, factor)
    else:
        weight = nn.Parameter(embedding["weight"].to(dtype), requires_grad=False)
        base.embed_tokens.weight, base.embed_tokens.num_embeddings = weight, len(weight)
        embedding = {"weight": weight}
    model.lm_head = linear_of(groups.get(HEAD, embedding), dtype)
    layers = [layer for layer in base.layers if not isinstance(layer, _Absent)]
    if layers:
        base.norm.load_state_dict(groups[NORM])
    for index, layer in enumerate(layers):
        state = groups[LAYER].items()
        own = {k.removeprefix(f"{index}."): t for k, t in state if k.startswith(f"{index}.")}
        fill_module(layer, own, dtype)


def grouped(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by the first part of their names."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = tensor
    return groups


def fill_module(module: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Load a module's weights, linear ones with scales as `Int8Linear`; RuntimeError for others."""
    state = dict(state)
    for name in [name for name in state if name.endswith(SCALE)]:
        path = name.removesuffix(f".weight{SCALE}")
        parts = {part: state.pop(f"{path}.{part}", None) for part in ("weight", "bias")}
        parts[f"weight{SCALE}"] = state.pop(name)
        plain = module.get_submodule(path)
        if not isinstance(plain, nn.Linear) or parts["weight"] is None:
            raise RuntimeError(f"{path} is no linear layer with a weight")
        if parts["weight"].shape != plain.weight.shape:
            raise RuntimeError(f"{path} has shape {tuple(parts['weight'].shape)}")
        given = {part: tensor for part, tensor in parts.items() if tensor is not None}
        module.set_submodule(path, linear_of(given, dtype))
    module.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()})


def linear_of(parts: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """A linear layer over these very tensors, without a copy where the dtype is theirs."""
    weight, bias, scale = (parts.get(name) for name in ("weight", "bias", "weight" + SCALE))
    assert weight is not None
    if scale is not None:
        return Int8Linear(weight, scale, dtype, bias)
    linear = frozen_linear(weight.to(dtype), None if bias is None else bias.to(dtype))
    if isinstance(weight, nn.Parameter):  # an embedding's
        linear.weight = weight
    return linear
