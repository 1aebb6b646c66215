"""Students: creation, training pass and checkpoints of each kind of drafter.

Legend: B batch, T tokens, M queries with loss, E hidden size, V draft vocabulary.
"""

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moaspec.backends.linear_backends import compute_dtype
from moaspec.model.baselines import KINDS, Baseline
from moaspec.model.checkpoint.baseline_checkpoint import save_baseline
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.model.masks import reused_layer_mask, text_mask
from moaspec.model.moa import MoADrafter, TargetPass, positions
from moaspec.target.families import keys_rotate_alike
from moaspec.target.registry import named_verifier
from moaspec.target.target import Target
from moaspec_train.accelerators import compile_mean
from moaspec_train.data_order import TrainBatch
from moaspec_train.dataset.examples import Example, frequent_tokens
from moaspec_train.run_config import TrainConfig, lsa_is_frozen
from moaspec_train.students.drafter_sizes import drafter_config, stack_config
from moaspec_train.students.initial_drafter import load_initial_drafter, record_length
from moaspec_train.students.losses import (
    ExitStates,
    exit_loss,
    fast_distil,
    logit_chunk_size,
    mean_over_exits,
    summary_loss,
)
from moaspec_train.students.target_activations import LayerMeanCache, TargetActivations
from moaspec_train.students.warm_start import (
    layer_inputs,
    make_later_layers_identity,
    non_massive_states,
    random_weights,
    warm_start,
)

log = logging.getLogger("moaspec.students.students")


@dataclass(frozen=True)
class StudentOutput:
    """Output of one training pass."""

    exits: Sequence[ExitStates]
    # Aggregates and the target's final states of real tokens, (tokens, E) each; None for drafters
    # without aggregates.
    summary: tuple[Tensor, Tensor] | None = None


class Student(ABC):
    """A drafter in training, as the training loop uses it.

    Args:
        examples: of the run, in a fixed order.
        train_ids: numbers of those whose responses determine a trimmed draft vocabulary.

    Attributes:
        activations: the target's, for these examples.
        exits: the N of each exit.
        draft_token_ids: (V',) ids of a trimmed draft vocabulary, or None.
        vocab_size: number of tokens that it can draft.
        chunk: queries whose logits are in memory at once.
    """

    def __init__(
        self,
        target: Target,
        config: TrainConfig,
        examples: Sequence[Example],
        train_ids: Sequence[int],
    ) -> None:
        config.require_vocabulary(target)
        self.target, self._config = target, config
        kept = config.activation_cache and config.frozen_lsa < 1.0  # else the means are enough
        directory = Path(config.output) / "activations" if kept else None
        before = [n for n in config.num_target_layers if n]
        self.activations = TargetActivations(
            target, examples, directory, before, finals_only=config.drafter != "moa"
        )
        self.module = self._make_module([examples[i] for i in train_ids])
        self.exits = config.num_target_layers
        self.draft_token_ids: Tensor | None = self.module.draft_token_ids
        ids = self.draft_token_ids
        self.vocab_size = target.vocab_size if ids is None else len(ids)
        self.chunk = logit_chunk_size(self.vocab_size, target.device)
        self._head = DraftVocabularyHead(target, ids)
        self._distil = fast_distil(target.device)

    @property
    def simulates_chain(self) -> bool:
        """Whether a training pass drafts as a real chain does, which simulated tau needs.

        In real chains EAGLE reads its own predictions, in training the target's states.
        """
        return self._config.drafter != "eagle"

    @cached_property
    def full_head(self) -> "DraftVocabularyHead":
        """The target's LM head for all tokens."""
        return DraftVocabularyHead(self.target, None)

    def _make_module(self, counted: Sequence[Example]) -> Any:
        return new_drafter(self.target, self._config, counted)

    def start(self, ids: Sequence[int]) -> None:  # noqa: B027 - baselines keep random weights
        """Initialise a new module from the target and the examples of these ids."""

    def add(self, examples: Sequence[Example]) -> None:  # noqa: B027 - baselines take any length
        """Expect examples that were not there at the start."""

    @abstractmethod
    def run(self, model: nn.Module, part: TrainBatch, step: int) -> StudentOutput:
        """Make a training pass with `model`, the wrapped `module`."""

    def loss(
        self, result: StudentOutput, whole: TrainBatch, *, processes: int = 1
    ) -> tuple[Tensor, Tensor]:
        """The loss of one training pass, as a part of the mean over all tokens of the step.

        Args:
            whole: all rows of the step.
            processes: gradients are averaged over them, so the loss is multiplied by their number.

        Returns:
            A scalar to backpropagate and the pass's sums, see `exit_loss`.
        """
        weights = self._config.loss
        scale = processes / max(1, whole.num_loss_tokens) / len(result.exits)
        proxies, parts = [], []
        for exit_states in result.exits:
            proxy, found = exit_loss(
                exit_states, weights, scale=scale, chunk=self.chunk, distil=self._distil
            )
            proxies.append(proxy)
            parts.append(found)
        if result.summary is not None and weights.summary:
            share = weights.summary * processes / whole.num_tokens
            proxies.append(share * summary_loss(*result.summary))
        return torch.stack(proxies).sum(), mean_over_exits(parts)

    def record(  # noqa: B027 - checkpoints of baselines do not store measurements
        self, acceptance: tuple[tuple[float, ...], ...], moment_EE: Tensor | None
    ) -> None:
        """Store held-out acceptance by exit and rank, and the first exit's moment."""

    def save(self, weights: Mapping[str, Tensor], directory: Path, info: Mapping[str, Any]) -> None:
        """Write a bf16 checkpoint with gathered weights on the CPU."""
        module = self.module  # may be sharded
        ids = module.draft_token_ids
        drafter = type(module)(module.config, None if ids is None else ids.cpu())
        drafter.load_state_dict(weights)
        if isinstance(drafter, MoADrafter):
            drafter.head_moment = module.head_moment
        save = save_drafter if isinstance(drafter, MoADrafter) else save_baseline
        save(
            drafter,
            directory,
            dtype=torch.bfloat16,
            training=info,
            verifier=named_verifier(self._config.target, self.target.config),
            shard_bytes=self._config.shard_bytes,
        )


def new_drafter(target: Target, config: TrainConfig, examples: Sequence[Example]) -> Any:
    """Create a drafter with random weights, its vocabulary counted in the examples' responses."""
    torch.manual_seed(config.seed)
    vocabulary = frequent_tokens(
        examples, size=config.sizes.draft_vocab, always=target.stop_token_ids
    )
    drafter = unfilled_drafter(target, config, vocabulary)
    if isinstance(drafter, MoADrafter) and keys_rotate_alike(target.config):
        record_length(drafter, examples)
    random_weights(drafter)
    if isinstance(drafter, MoADrafter):
        make_later_layers_identity(drafter)
    return drafter.float().to(target.device)


def unfilled_drafter(
    target: Target, config: TrainConfig, vocabulary: Tensor | None
) -> MoADrafter | Baseline:
    """Build a drafter of the kind `config.drafter`, with weights as PyTorch leaves them."""
    if config.drafter == "moa":
        shape = drafter_config(target, config.sizes, config.num_target_layers)
        return MoADrafter(shape, vocabulary)
    stack = stack_config(target, config.sizes, config.drafter)
    return KINDS[config.drafter](stack, vocabulary)


class DraftVocabularyHead:
    """The target's LM head for the draft vocabulary.

    On a CPU without bf16 instructions the rows of a bf16 target are kept in float32, because
    emulated products are ten times slower; states are not rounded then.

    Args:
        token_ids: the draft vocabulary; None for the full one.
    """

    def __init__(self, target: Target, token_ids: Tensor | None) -> None:
        self._target, self._dtype = target, target.dtype
        if target.device.type == "cpu":
            self._dtype = compute_dtype(target.dtype)
        if token_ids is None and self._dtype != target.dtype:
            token_ids = torch.arange(target.vocab_size)
        self._rows = None if token_ids is None else target.lm_head.rows(token_ids).to(self._dtype)
        head = target.draft_head(None) if self._rows is None else self._rows
        is_product = target.lm_head.cap is None and target.lm_head.scale == 1.0
        self._product = head if is_product and isinstance(head, nn.Linear) else None
        self._known_V: Tensor | None = None
        if token_ids is not None:
            known_V = torch.zeros(target.vocab_size, dtype=torch.bool)
            known_V[token_ids.cpu()] = True
            self._known_V = known_V.to(target.device)

    def __call__(self, states_ME: Tensor) -> Tensor:
        """(M, E) states -> (M, V) logits, in float32 if they are more than a product."""
        states_ME = states_ME.to(self._dtype)
        if self._product is not None:
            return self._product(states_ME)
        if self._rows is None:
            return self._target.head(states_ME)
        return self._target.logits(states_ME, self._rows)

    def knows(self, token_ids_M: Tensor) -> Tensor | None:
        """Which of these tokens it has, (M,) bool; None where it has all."""
        return None if self._known_V is None else self._known_V[token_ids_M]


def draftable(head: DraftVocabularyHead, part: TrainBatch) -> Tensor | None:
    """Queries whose next token the head can draft, (M,) bool; None for all."""
    next_M = part.places.queries.text_M + 1  # in its row: queries are followed by another token
    return head.knows(part.batch.input_ids_BT.flatten().index_select(0, next_M))


class MoAStudent(Student):
    """A Mixture-of-Attentions drafter in training."""

    _means: LayerMeanCache | None = None

    def _make_module(self, counted: Sequence[Example]) -> Any:
        config = self._config
        if config.initial:
            module = load_initial_drafter(self.target, config, counted)
        else:
            module = super()._make_module(counted)
        if config.device == "cuda" and config.sharding == "none" and not config.frozen_lsa:
            encoder: Any = module.encoder
            encoder.mean_over_layers = compile_mean(encoder)
        return module

    @torch.no_grad()
    def start(self, ids: Sequence[int]) -> None:
        """Apply the warm start, and set each exit's scale of states."""
        config = self._config
        if config.initial:
            return
        if config.warm_start:
            log.info("Warm start: reading up to %d tokens", config.warm_start_tokens)
            sample = self.activations.sample(ids, config.warm_start_tokens)
            warm_start(self.target, self.module, list(sample))
        elif self.module.exits:
            _, result = next(self.activations.sample(ids, 1))
            for n in self.exits:
                adapter: Any = self.module.exits[str(n)]
                nn.init.eye_(adapter.linear.weight)
                _, scale = non_massive_states(layer_inputs(result, n)[0])
                adapter.scale.fill_(scale)

    def add(self, examples: Sequence[Example]) -> None:
        if self.module.config.trained_positions:
            record_length(self.module, examples)

    def run(self, model: nn.Module, part: TrainBatch, step: int) -> StudentOutput:
        """Run all exits; while LSA is frozen its means are read from the cache."""
        part = part.with_places()
        batch, blocks, target = part.batch, part.blocks, self.target
        kv_or_means, result = self._encoder_input(part, step)
        # The target's layers that an exit reuses attend to the states of all tokens.
        wanted = None if any(self.exits) else part.places.queries
        aggregated_BTE, *outputs = model(
            target.embed(batch.input_ids_BT).float(),
            kv_or_means,
            batch.attention_mask_BT,
            blocks.last_verified_BT,
            staircase_B=part.staircase_B,
            wanted=wanted,
        )
        exits = [self._exit(n, x, part, result) for n, x in zip(self.exits, outputs, strict=True)]
        real_T = part.places.real_T
        pair = (aggregated_BTE, result.hidden_BTE)
        summary = [x_BTE.flatten(0, 1).index_select(0, real_T).float() for x_BTE in pair]
        return StudentOutput(exits, (summary[0], summary[1]))

    def _encoder_input(self, part: TrainBatch, step: int) -> tuple[Tensor, TargetPass]:
        """The argument `kv_or_means` of `MoADrafter.forward`, and the target's pass."""
        if not lsa_is_frozen(self._config, step):
            result = self.activations.passes(part.batch)
            return result.kv_BTLK, result
        if self._means is None:
            directory = Path(self._config.kept or Path(self._config.output) / "means")
            bf16 = self._config.mixed_precision == "bf16"
            self._means = LayerMeanCache(
                self.activations, self.module.encoder, directory, bf16=bf16
            )
        return self._means.read(part.batch)

    def _exit(self, n: int, states: Tensor, part: TrainBatch, result: TargetPass) -> ExitStates:
        """Final states of an exit at the queries with loss, after the reused layers.

        Args:
            states: of all tokens, (B, T, E), or of these queries only, (M, E).
        """
        at, inner = part.places.queries.of_text, None
        if n:
            inner = (at(states).float(), at(result.before[n]).float())
            mask_BT = part.batch.attention_mask_BT
            states = self.target.reuse_layers(
                states.to(self.target.dtype),
                positions(mask_BT),
                mask=reused_layer_mask(text_mask(mask_BT), part.blocks.last_verified_BT),
                kv_BTLK=result.kv_BTLK,
                num=n,
            )
        return ExitStates(
            (states if states.ndim == 2 else at(states)).float(),
            at(result.hidden_BTE).float(),
            self._head,
            inner=inner,
            relative=bool(self.module.exits),
            draftable_M=draftable(self._head, part),
        )

    def record(self, acceptance: tuple[tuple[float, ...], ...], moment_EE: Tensor | None) -> None:
        """Store the rates that weigh drafts, and the moment that guides the head's quantisation."""
        first, *others = ((by_rank,) for by_rank in acceptance)
        self.module.config = dataclasses.replace(
            self.module.config, acceptance=first, further_acceptance=tuple(others)
        )
        self.module.head_moment = moment_EE


class BaselineStudent(Student):
    """EAGLE's head, or an independent small language model.

    Their attention ignores blocks, which only select the queries with loss.
    """

    def run(self, model: nn.Module, part: TrainBatch, step: int) -> StudentOutput:  # noqa: ARG002
        """Run over whole texts; EAGLE reads the target's states."""
        part = part.with_places()
        batch, at = part.batch, part.places.queries.of_text
        hidden_BTE = self.activations.final_states(batch).float()
        mask_BT = batch.attention_mask_BT
        inputs = [self.target.embed(batch.input_ids_BT).float()]
        if self.module.kind == "eagle":
            inputs.append(hidden_BTE)
        states_BTE = model(*inputs, positions(mask_BT), mask_BT)
        found = ExitStates(
            at(states_BTE).float(),
            at(hidden_BTE),
            self._head,
            draftable_M=draftable(self._head, part),
        )
        return StudentOutput([found])
