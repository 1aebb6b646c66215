"""All decoder layers and the final norm of a target, by the `forward` of its own model.

Legend: B batch, T new tokens, S visible keys, E hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from moaspec.target.decoder_layers import DecoderLayers, WatchLayer, WriteKV, cache_argument
from moaspec.target.generic.pass_cache import KVShape, PassCache
from moaspec.target.generic.pass_masks import PassMasks, masks_of_pass
from moaspec_core.errors import UnsupportedTargetError


class GenericLayers(DecoderLayers):
    """Decoder layers that can only be run together, from token ids.

    Args:
        base: transformers' text model without its head.

    Attributes:
        kv_shape: of the keys and values that its layers keep.
        cache_class: what its layers see as their cache.
        state_bytes: of one text's recurrent and convolution states.
    """

    state_bytes = 0

    def __init__(self, base: Any) -> None:
        self._base = base
        self._cache_argument = cache_argument(base)
        self.cache_class = PassCache
        self.kv_shape: KVShape | None = None

    def modules(self) -> Sequence[nn.Module]:
        """The decoder layers: the first list of modules of the length in the config.

        If there is none, the list `layers`: its modules may have several attentions (LongCat).
        """
        lists = {
            name: list(one)
            for name, one in self._base.named_children()
            if isinstance(one, nn.ModuleList)
        }
        expected = int(self._base.config.num_hidden_layers)
        exact = (one for one in lists.values() if len(one) == expected)
        return next(exact, lists.get("layers", []))

    def measure(self, token_ids_1T: Tensor) -> KVShape:
        """Run a pass, and return the shapes of the keys and values that layers hand to the cache.

        Raises:
            UnsupportedTargetError: a layer does not hand over one key and value per token.
        """
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def write(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            if layer in seen:
                raise UnsupportedTargetError(f"layer {layer} keeps more than one pair a token")
            seen[layer] = key, value
            return key, value

        num_tokens = token_ids_1T.shape[1]
        positions_1T = torch.arange(num_tokens, device=token_ids_1T.device)[None]
        try:
            self.run_tokens(token_ids_1T, positions_1T, mask_B1TS=None, write=write)
        except RuntimeError:
            if not (seen and token_ids_1T.is_meta):
                raise
            # A router of experts fails on the meta device; later layers have the same shapes.
            for layer in range(int(self._base.config.num_hidden_layers)):
                seen.setdefault(layer, seen[min(seen)])
        if not seen:
            raise UnsupportedTargetError("no layer hands keys and values to the cache")
        _require_one_a_token(seen, num_tokens)
        self.kv_shape = KVShape.of(seen)
        return self.kv_shape

    def run_tokens(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        *,
        mask_B1TS: Tensor | None,
        write: WriteKV,
        watch: WatchLayer | None = None,
    ) -> Tensor:
        """A pass through all layers, (B, T, E) after the final norm; see `Target.run`."""
        num_visible = input_ids_BT.shape[1] if mask_B1TS is None else mask_B1TS.shape[-1]
        cache = {self._cache_argument: self.cache_class(write, self.kv_shape, num_visible)}
        with masks_of_pass(PassMasks(mask_B1TS, position_ids_BT)), self._watched(watch):
            output = self._base(
                input_ids=input_ids_BT,
                position_ids=position_ids_BT,
                attention_mask=self.padding(position_ids_BT, write),
                use_cache=True,
                **cache,
            )
        return cast(Tensor, output.last_hidden_state)

    def padding(self, position_ids_BT: Tensor, write: WriteKV) -> Tensor | None:
        """False for tokens that must not enter a layer's state; None if layers have no states."""
        del position_ids_BT, write
        return None

    def run(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedTargetError: a model's `forward` begins with its first layer."""
        raise UnsupportedTargetError(
            f"The last layers of a {self._base.config.model_type!r} model cannot be run alone, so "
            "its drafter cannot reuse them. Take num_target_layers=0."
        )

    @contextmanager
    def _watched(self, watch: WatchLayer | None) -> Iterator[None]:
        """Call `watch` with the input of each layer, inside the block."""
        with ExitStack() as stack:
            if watch is not None:
                for index, layer in enumerate(self.modules()):
                    hook = layer.register_forward_pre_hook(partial(_watch, watch, index))
                    stack.callback(hook.remove)
            yield


def _watch(watch: WatchLayer, index: int, _: Any, inputs: tuple[Tensor, ...]) -> None:
    watch(index, inputs[0])


def _require_one_a_token(seen: Mapping[int, tuple[Tensor, Tensor]], num_tokens: int) -> None:
    for layer, pair in seen.items():
        if any(part.ndim != 4 or part.shape[2] != num_tokens for part in pair):
            shapes = " and ".join(str(tuple(part.shape)) for part in pair)
            raise UnsupportedTargetError(
                f"layer {layer} keeps tensors of shape {shapes} for {num_tokens} tokens, instead "
                "of keys and values of each"
            )
