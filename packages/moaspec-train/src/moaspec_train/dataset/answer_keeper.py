"""Keeps what training reads of each answer while the target writes it.

Training on answers with a frozen LSA needs the target's final states and LSA's means over layers.
While an answer is decoded the target computes both, so that it never reads the answer again.

Legend: N tokens of all requests, T tokens of one text, E hidden size, L layers, K one layer's key
and value.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moaspec.drafting.kv_cache import KVCache, tree_mask
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.model.moa import MoADrafter
from moaspec.target.generic.hybrid_layers import HybridLayers
from moaspec.target.target import Target, plain_torch
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import Features, Need, Proposer, RequestText
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.position_rules import PositionRules
from moaspec_core.errors import InputError
from moaspec_train.dataset.examples import Example
from moaspec_train.students.target_activations import LayerMeanCache, TargetActivations


class _KeepingVerifier(LocalVerifier):
    """A verifier whose rows can be read after their requests have ended."""

    def close(self, row: int) -> None:
        """Keep its keys until the next request in the row overwrites them."""


class AnswerKeeper(Proposer):
    """A proposer that drafts nothing and stores states, in the `kept` directory of training.

    Args:
        drafter: its LSA makes the means. Training goes on from it (`initial`), with LSA frozen.
        directory: see `TextStore`.
        max_length: tokens of a training example; no more of a text are kept.

    Raises:
        InputError: a drafter that reuses layers of the target, or a target whose keys depend on
            more than positions or that has other layers than attention.
        TrainingError: the directory cannot be written.
    """

    needs: frozenset[Need] = frozenset({"final_states"})

    def __init__(
        self, target: Target, drafter: MoADrafter, directory: Path, *, max_length: int
    ) -> None:
        reused = max(drafter.config.num_target_layers)
        if reused:
            raise InputError(
                f"States are kept for drafters with num_target_layers=0; this one reuses {reused} "
                "layers of the target. Training computes them where none are kept."
            )
        if isinstance(target.layers, HybridLayers) or not PositionRules.of(target).are_plain:
            raise InputError(
                f"States of {target.name} cannot be kept while it writes, because its keys do not "
                "depend on positions alone. Training computes them where none are kept."
            )
        self._target, self._max_length = target, max_length
        # What training reads with: the same probe, and the same means.
        cache = LayerMeanCache(
            TargetActivations(target, (), None), drafter.encoder, directory, bf16=True
        )
        self._encoder, self._store = cache.encoder, cache.store
        self._states: dict[int, list[Tensor]] = {}  # by cache row
        self._ended: deque[tuple[int, list[Tensor]]] = deque()  # not kept yet, in order
        self._cache: KVCache

    def engine(self) -> Engine:
        """A new engine, whose ended requests must be given to `keep` in order after each step."""
        self._states.clear()
        self._ended.clear()
        verifier = _KeepingVerifier(self._target, self)
        self._cache = verifier.cache
        return Engine(verifier, self, target=self._target)

    def encode(
        self, hidden_1NE: Tensor, _position_ids_1N: Tensor, counts: Sequence[int]
    ) -> list[Features]:
        """The states themselves, split by request: (n, E) each."""
        return list(hidden_1NE[0].split(list(counts)))

    def append_features(self, row: int, features: Features) -> None:
        self._states.setdefault(row, []).append(features)

    def propose(self, requests: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        del shape
        return [DraftTree()] * len(requests)

    def close(self, row: int) -> None:
        self._ended.append((row, self._states.pop(row, [])))

    @plain_torch()
    @torch.inference_mode()
    def keep(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
        """Store the states of the request of `engine` that ended first of those not yet kept.

        Args:
            prompt_ids: of this request.
            response_ids: of this request, all that it wrote.

        Raises:
            TrainingError: the directory cannot be written.
        """
        row, states = self._ended.popleft()
        num_states = len(prompt_ids) + len(response_ids) - 1
        assert sum(map(len, states)) == num_states, "requests are kept in the order of their ends"
        kept = Example(prompt_ids, response_ids).cut(self._max_length)
        if kept is None or kept.tokens in self._store:
            return
        with self._target.limited_threads():
            if len(kept) == len(prompt_ids) + len(response_ids):
                states.append(self._last_states(row, len(kept) - 1, int(kept.tokens[-1])))
            hidden_TE = torch.cat(states)[: len(kept)]
            kv_1TLK = self._cache.features(row, 0, len(kept))
            mean_TK = self._encoder.mean_over_layers(kv_1TLK)[0]
        self._store.put(kept.tokens, {"mean": mean_TK, "hidden": hidden_TE})

    def _last_states(self, row: int, position: int, token: int) -> Tensor:
        """The pass over a text's last token, which decoding does not need: (1, E)."""
        cache, device = self._cache, self._target.device
        cache.reserve(row + 1, position + 1)
        one = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        states_1TE = self._target.run(
            torch.tensor([[token]], device=device),
            torch.tensor([[position]], device=device),
            mask_B1TS=tree_mask([position], one, position + 1),
            write=cache.writer([row], [position], 1, position + 1),
        )
        return states_1TE[0]
