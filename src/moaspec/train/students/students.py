"""What is trained: how each kind of drafter is made, run over a batch, and written.

Legend: B batch, T tokens, M queries with loss, E hidden size, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moaspec.backends.linear_backends import compute_dtype
from moaspec.errors import InputError
from moaspec.generation.drafters import load_drafter
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.model.masks import reused_layer_mask, text_mask
from moaspec.model.moa import MoADrafter, TargetPass, positions
from moaspec.target.target import Target
from moaspec.train.data_order import BatchPart
from moaspec.train.dataset.examples import Example, frequent_tokens
from moaspec.train.run_config import TrainConfig, drafter_config
from moaspec.train.schedule import lsa_is_frozen
from moaspec.train.students.losses import ExitStates
from moaspec.train.students.target_reader import FrozenMeans, TargetReader
from moaspec.train.students.warm_start import (
    entering,
    fit_exits,
    random_weights,
    usual_states,
    warm_start,
)


@dataclass(frozen=True)
class StudentPass:
    """One pass of what is trained over a part of a step.

    Attributes:
        exits: what each exit gave.
        summary: aggregates of real tokens and the target's final states of them, (tokens, E) each;
            None where there is no aggregate.
    """

    exits: Sequence[ExitStates]
    summary: tuple[Tensor, Tensor] | None = None


class Student(Protocol):
    """One kind of drafter, as the loop sees it.

    Attributes:
        module: what learns.
        exits: the N of each exit.
        draft_token_ids: (V',) ids of a trimmed draft vocabulary, or None.
        simulates: whether a training pass drafts what a chain would, as long as it agrees.
    """

    exits: tuple[int, ...]
    draft_token_ids: Tensor | None
    simulates: bool

    @property
    def module(self) -> nn.Module: ...

    def start(self, ids: Sequence[int]) -> None:
        """Give a new module what is known without training, from these examples."""
        ...

    def run(self, model: nn.Module, part: BatchPart, step: int) -> StudentPass:
        """Run `model`, which is `module` as the processes share it."""
        ...

    def record(self, acceptance: tuple[tuple[float, ...], ...], moment_EE: Tensor | None) -> None:
        """Take in what was measured on held-out drafts, for the checkpoint; see `Measured`.

        Args:
            acceptance: by exit, then by rank.
            moment_EE: of the first exit.
        """
        ...

    def save(
        self, weights: Mapping[str, Tensor], directory: Path, facts: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint."""
        ...


def new_drafter(target: Target, config: TrainConfig, examples: Sequence[Example]) -> MoADrafter:
    """A drafter with random weights."""
    _check_vocabulary(target, config)
    torch.manual_seed(config.seed)
    vocabulary = frequent_tokens(
        examples, size=config.sizes.draft_vocab, always=target.stop_token_ids
    )
    shape = drafter_config(target, config.sizes, config.num_target_layers)
    drafter = MoADrafter(shape, vocabulary)
    random_weights(drafter)
    return drafter.float().to(target.device)


def _check_vocabulary(target: Target, config: TrainConfig) -> None:
    if config.sizes.draft_vocab > target.vocab_size:
        raise InputError(
            f"sizes.draft_vocab={config.sizes.draft_vocab}: {target.name} has {target.vocab_size} "
            "tokens; 0 keeps them all."
        )


def earlier_drafter(
    target: Target, config: TrainConfig, examples: Sequence[Example]
) -> tuple[MoADrafter, int | None]:
    """The drafter that `config.initial` names, in float32, with the vocabulary and N asked for.

    Returns:
        The drafter, and the N that it had alone if it has got exits, which `fit_exits` starts.

    Raises:
        InputError: it drafts with more tokens than `config.sizes.draft_vocab`, or has exits for
            other N than `config.num_target_layers`.
    """
    _check_vocabulary(target, config)
    drafter = load_drafter(config.initial, target=target).float()
    had, wanted = drafter.config.num_target_layers, config.num_target_layers
    if had != wanted and drafter.exits:
        raise InputError(
            f"initial={config.initial} drafts with N = {had}, and num_target_layers asks for "
            f"{wanted}. Set it to the same; only a drafter without exits can get others."
        )
    grows = had != wanted
    if grows:
        shape = dataclasses.replace(
            drafter.config,
            num_target_layers=wanted,
            adapter=len(wanted) == 1,
            acceptance=(),
            further_acceptance=(),
        )
        grown = MoADrafter(shape, drafter.draft_token_ids)
        grown.load_state_dict(drafter.state_dict(), strict=False)  # it has no exits
        drafter = grown.to(target.device)
    _grow_vocabulary(drafter, config, examples)
    return drafter.requires_grad_(requires_grad=True), had[0] if grows else None


def _grow_vocabulary(drafter: MoADrafter, config: TrainConfig, examples: Sequence[Example]) -> None:
    """Let a drafter point at more tokens; no weight of it depends on how many there are."""
    size, ids = config.sizes.draft_vocab, drafter.draft_token_ids
    if size == 0:
        return
    if ids is None or size < len(ids):
        has = "all" if ids is None else len(ids)
        raise InputError(
            f"sizes.draft_vocab={size}: initial={config.initial} drafts with {has} tokens, and its "
            "vocabulary can only grow; 0 keeps it."
        )
    drafter.draft_token_ids = frequent_tokens(examples, size=size, always=ids.tolist())


class TrimmedHead:
    """The target's LM head for the draft vocabulary, its rows gathered once.

    Those of a bf16 target are kept in float32 on a CPU without bf16 instructions, where emulated
    products take ten times as long; what they are multiplied with is not rounded then.

    Args:
        target: the frozen target.
        token_ids: the draft vocabulary, None for the full one.
    """

    def __init__(self, target: Target, token_ids: Tensor | None) -> None:
        self._target, self._dtype = target, target.dtype
        if target.device.type == "cpu":
            self._dtype = compute_dtype(target.dtype)
        if token_ids is None and self._dtype != target.dtype:
            token_ids = torch.arange(target.vocab_size)
        self._rows = None if token_ids is None else target.head_rows(token_ids).to(self._dtype)

    def __call__(self, states_ME: Tensor) -> Tensor:
        """(M, E) states -> (M, V) float32 logits."""
        states_ME = states_ME.to(self._dtype)
        if self._rows is None:
            return self._target.head(states_ME)
        return self._target.logits(states_ME, self._rows)


def export(
    module: Any,
    weights: Mapping[str, Tensor],
    write: Callable[..., None],
    *,
    facts: Mapping[str, Any],
    shard_bytes: int,
) -> None:
    """Write a checkpoint in bf16 with these weights, whole and on the CPU.

    Args:
        module: the drafter in training, which may be in shards.
        weights: its state.
        write: `save_drafter` or `save_baseline`, with its directory.
        facts: of the run, for the checkpoint.
        shard_bytes: largest file of weights.
    """
    ids = module.draft_token_ids
    drafter = type(module)(module.config, None if ids is None else ids.cpu())
    drafter.load_state_dict(weights)
    if isinstance(drafter, MoADrafter):
        drafter.head_moment = module.head_moment
    write(drafter, dtype=torch.bfloat16, training=facts, shard_bytes=shard_bytes)


class MoAStudent:
    """A Mixture-of-Attentions drafter with one or several exits.

    Args:
        target: the frozen target.
        reader: of its activations.
        config: of the run.
        output: directory of the run.
    """

    def __init__(
        self, target: Target, reader: TargetReader, config: TrainConfig, output: Path
    ) -> None:
        self.simulates = True
        self._target, self._reader, self._config, self._output = target, reader, config, output
        self._had: int | None = None
        self.module: MoADrafter
        if config.initial:
            self.module, self._had = earlier_drafter(target, config, reader.examples)
        else:
            self.module = new_drafter(target, config, reader.examples)
        self.exits = config.num_target_layers
        self.draft_token_ids = self.module.draft_token_ids
        self._head = TrimmedHead(target, self.draft_token_ids)
        self._means: FrozenMeans | None = None

    @torch.no_grad()
    def start(self, ids: Sequence[int]) -> None:
        """Informed initial weights (`warm_start`), and each exit's size of states."""
        config = self._config
        sample = self._reader.sample(ids, config.warm_start_tokens)
        if config.initial:
            if self._had is not None:
                fit_exits(self._target, self.module, sample, had=self._had)
            return
        if config.warm_start:
            warm_start(self._target, self.module, sample)
        if self.module.exits:
            _, result = next(self._reader.sample(ids, 1))
            for n in self.exits:
                adapter: Any = self.module.exits[str(n)]
                nn.init.eye_(adapter.linear.weight)
                _, scale = usual_states(entering(result, n)[0])
                adapter.scale.fill_(scale)

    def run(self, model: nn.Module, part: BatchPart, step: int) -> StudentPass:
        """All exits of a part; LSA's means are read back while it is frozen."""
        batch, blocks, target = part.batch, part.blocks, self._target
        read, result = self._read(part, step)
        aggregated_BTE, *outputs = model(
            target.embed(batch.input_ids_BT).float(),
            read,
            batch.attention_mask_BT,
            blocks.block_start_BT,
            staircase_B=part.staircase_B,
        )
        hidden_BTE, real_BT = result.hidden_BTE.float(), batch.attention_mask_BT.bool()
        return StudentPass(
            [self._exit(n, x, part, result) for n, x in zip(self.exits, outputs, strict=True)],
            (aggregated_BTE.float()[real_BT], hidden_BTE[real_BT]),
        )

    def _read(self, part: BatchPart, step: int) -> tuple[Tensor, TargetPass]:
        if not lsa_is_frozen(self._config, step):
            result = self._reader.passes(part.batch)
            return result.kv_BTLK, result
        if self._means is None:
            directory = self._output / "means"
            bf16 = self._config.mixed_precision == "bf16"
            self._means = FrozenMeans(self._reader, self.module.encoder, directory, bf16=bf16)
        return self._means.read(part.batch)

    def _exit(self, n: int, states_BTE: Tensor, part: BatchPart, result: TargetPass) -> ExitStates:
        """Final states of an exit, after the reused layers, at the queries with loss."""
        loss_BT, inner = part.blocks.loss_BT, None
        final_BTE = states_BTE
        if n:
            inner = (states_BTE[loss_BT].float(), result.before[n][loss_BT].float())
            mask_BT = part.batch.attention_mask_BT
            final_BTE = self._target.reuse_layers(
                states_BTE.to(self._target.dtype),
                positions(mask_BT),
                mask=reused_layer_mask(text_mask(mask_BT), part.blocks.block_start_BT),
                kv_BTLK=result.kv_BTLK,
                num=n,
            )
        return ExitStates(
            final_BTE[loss_BT].float(),
            result.hidden_BTE[loss_BT].float(),
            self._head,
            self._head,
            inner=inner,
            relative=bool(self.module.exits),
        )

    def record(self, acceptance: tuple[tuple[float, ...], ...], moment_EE: Tensor | None) -> None:
        """Decoding weighs what to draft by these rates, and rounds the head by the moment."""
        first, *further = ((by_rank,) for by_rank in acceptance)
        self.module.config = dataclasses.replace(
            self.module.config, acceptance=first, further_acceptance=tuple(further)
        )
        self.module.head_moment = moment_EE

    def save(
        self, weights: Mapping[str, Tensor], directory: Path, facts: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint that `load_drafter` reads, bf16."""
        write = partial(save_drafter, directory=directory)
        export(self.module, weights, write, facts=facts, shard_bytes=self._config.shard_bytes)
