"""Drafting by onnxruntime as a `Proposer` of a device."""

from collections.abc import Sequence

from moaspec_core.drafting.draft_noise import best_draft
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import RequestText
from moaspec_edge.device.device_parts import DeviceProposer
from moaspec_edge.device_onnx.onnx_drafter import OnnxDrafter
from moaspec_edge.protocol.activation_layout import ActivationLayout, Activations
from moaspec_edge.protocol.codec import Codec, CodecName
from moaspec_edge.protocol.wire import chain

READ_TOKENS = 256
"""Most tokens of a text in one run; bounds the memory of activations."""


class OnnxProposer(DeviceProposer):
    """Drafts chains for one text, the only row.

    Args:
        drafter: with caches of this text alone.
    """

    chains_only = True

    def __init__(self, drafter: OnnxDrafter) -> None:
        self._drafter = drafter
        self._num_read = 0
        self.num_target_layers = drafter.manifest.num_target_layers

    def adopt(self, drafter: OnnxDrafter) -> None:
        """Draft with its version from now on. Activations stay; SA reads the text again."""
        if self._drafter.adopt(drafter):
            self._num_read = 0

    def layout(self, codec: CodecName) -> ActivationLayout:
        manifest, number = self._drafter.manifest, self.num_target_layers
        sizes, target = manifest.cross_attention, manifest.target
        memory = Codec(codec, 2 * sizes["num_kv_heads"], sizes["head_dim"])
        if not number:
            return ActivationLayout(memory)
        vectors = 2 * number * target["num_kv_heads"]
        return ActivationLayout(memory, Codec(codec, vectors, target["head_dim"]), number)

    def place_activations(self, row: int, start: int, activations: Activations) -> None:
        del row  # the only one
        self._drafter.place(start, *activations)

    def propose(self, rows: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        """Draft a chain as deep as the shape; see `Proposer`."""
        (row,) = rows
        tokens = list(row.token_ids)
        length = len(tokens)
        while len(tokens) < length + shape.depth:
            tokens.append(self._next(tokens, row))
        return [chain(tokens[length:])]

    def _next(self, tokens: Sequence[int], row: RequestText) -> int:
        """The draft after these tokens; the drafter first reads the ones it lacks."""
        start = min(self._num_read, len(tokens) - 1)
        while True:
            piece = tokens[start : start + READ_TOKENS]
            drafts = self._drafter.run(piece, start)
            start = self._num_read = start + len(piece)
            if start == len(tokens):
                return best_draft(drafts.token_ids, drafts.log_q, row.sampling, start)

    def rollback(self, row: int, length: int) -> None:
        del row  # later slots are overwritten
        self._num_read = min(self._num_read, length)
        self._drafter.cut(length)

    def close(self, row: int) -> None:
        self.rollback(row, 0)
