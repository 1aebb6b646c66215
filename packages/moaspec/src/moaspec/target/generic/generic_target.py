"""A target of any model type that keeps to transformers' interfaces of attention and cache.

Legend: B batch, T tokens, S visible keys, E hidden size, V vocabulary.
"""

import weakref
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moaspec.target.decoder_layers import LMHead
from moaspec.target.families import is_family
from moaspec.target.generic import rules
from moaspec.target.generic.generic_layers import GenericLayers
from moaspec.target.generic.hybrid_layers import HybridLayers
from moaspec.target.generic.pass_cache import KVShape, ShortTextCache
from moaspec.target.generic.pass_masks import attend_by_pass
from moaspec.target.generic.self_test import require_equal
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target
from moaspec_core.errors import UnsupportedTargetError


def target_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **options: Any
) -> Target:
    """A `Target` for a family of `moaspec_core.tokens.names`, a `GenericTarget` for other models.

    Raises:
        UnsupportedTargetError: says why this model cannot be drafted for.
    """
    kind = Target if is_family(model.config) else GenericTarget
    return kind(model, tokenizer, **options)


def set_position_rules(target: Target) -> None:
    """Set the position rules of a target that runs by `forward` of its model.

    No layer can be run without the others. Keys depend on positions alone: `rules.context_length`
    ends texts before they would depend on more.
    """
    target.num_reusable_layers = 0
    target.max_positions = rules.context_length(target.config)
    target.rope_switches, target.rope_growth = (), None


_TESTED: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, GenericLayers, KVShape]] = (
    weakref.WeakKeyDictionary()
)
"""The layers of each model that passed the self-test, and the state of the model at that time:
`custom_generate` makes a target in each call. Not an attribute, which would be copied and saved."""


class GenericTarget(Target):
    """A target whose passes are `forward` of its own model.

    Of a multimodal model this is the text part, and `config` is that part's. The model attends by
    the masks of our passes, and otherwise as before; see `moaspec.target.generic.pass_masks`.

    Raises:
        UnsupportedTargetError: says why this model cannot be drafted for.
    """

    layers: GenericLayers

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        freeze: bool = True,
        quantize: str | None = None,
    ) -> None:
        rules.require_generic(model, name)
        if quantize is not None:
            raise rules.refusal(
                model.config,
                name,
                f"quantize={quantize!r} rounds linear layers of the families "
                "that `moaspec models` lists only",
            )
        self.model = model.eval().requires_grad_(requires_grad=False) if freeze else model
        TargetSpec.__init__(
            self,
            rules.text_config(model.config),
            tokenizer,
            name=name,
            dtype=None,
            generation_config=model.generation_config,
            quantize=quantize,
        )
        self._base: Any = rules.text_model(model)
        attend_by_pass(self._base.config)
        head = cast(nn.Linear, model.get_output_embeddings())
        self.lm_head = LMHead(head, *rules.head_rule(self.config))
        try:
            shape = self._set_tested_layers()
        except UnsupportedTargetError as error:
            raise rules.refusal(self.config, name, str(error)) from error
        self.state_bytes = self.layers.state_bytes
        self.num_layers, self.num_kv_heads = len(shape.layers), shape.num_heads
        self.head_dim = shape.head_dim
        if not shape.is_even:
            width = self.config.hidden_size // self.config.num_attention_heads
            self.draft_head_dim = max(8, width // 8 * 8)
        set_position_rules(self)

    def _set_tested_layers(self) -> KVShape:
        """Set the layers that passed the self-test, which runs once for each state of a model."""
        parts = tuple(id(module) for module in self.model.modules())
        state = parts, self.dtype, self.device, self.config._attn_implementation
        tested = _TESTED.get(self.model)
        if tested is None or tested[0] != state:
            kind = HybridLayers if rules.has_states(self.config) else GenericLayers
            self.layers = kind(self._base)
            if rules.uses_cache_length(self.config):
                self.layers.cache_class = ShortTextCache
            _TESTED[self.model] = tested = state, self.layers, require_equal(self)
        _, self.layers, shape = tested
        return shape

    def embed(self, input_ids: Tensor) -> Tensor:
        """Rows of the model's embedding, (..., E), which some models scale afterwards."""
        return cast(Tensor, self._base.get_input_embeddings()(input_ids))

    def run(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        *,
        lengths_B: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        del lengths_B  # rotary embeddings go by positions alone
        return self.layers.run_tokens(input_ids_BT, position_ids_BT, **options)

    @property
    def embeddings(self) -> None:
        """None: some models change what the embedding looks up."""
        return None

    def layer_state(self, index: int) -> dict[str, Tensor]:
        """Weights of one decoder layer, under transformers' names; empty beyond the last layer."""
        layers = self.layers.modules()[index : index + 1]
        return cast(dict[str, Tensor], layers[0].state_dict()) if layers else {}

    def plain_layer_state(self, index: int) -> dict[str, Tensor] | None:
        """None: nothing is known of how its layers are built."""
        del index
        return None
