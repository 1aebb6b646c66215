"""The drafter that a run continues from, with the parts that the run adds to it."""

import dataclasses
from collections.abc import Sequence

import torch

from moaspec.generation.drafters import find_drafter
from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint
from moaspec.model.layers import FoldedPositions
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import DrafterConfig
from moaspec_core.errors import InputError
from moaspec_train.dataset.examples import Example, frequent_tokens
from moaspec_train.run_config import TrainConfig
from moaspec_train.students.warm_start import make_later_layers_identity, random_weights


def load_initial_drafter(
    target: Target, config: TrainConfig, examples: Sequence[Example]
) -> MoADrafter:
    """Load the drafter `config.initial` in float32, and adapt its vocabulary and SA's layers.

    Raises:
        InputError: its vocabulary is larger than `config.sizes.draft_vocab`, it has more layers
            than `config.sizes.sa_layers`, or another N than `config.num_target_layers`.
    """
    source = find_drafter(config.initial)
    drafter = load_checkpoint(source, target.identity, target.config).to(target.dtype).float()
    had, wanted = drafter.config.num_target_layers, config.num_target_layers
    if had != wanted:
        raise InputError(
            f"initial={config.initial} drafts with N = {had}, and num_target_layers asks for "
            f"{wanted}. Set it to the same, or train a new drafter."
        )
    shape = _with_more_layers(drafter.config, config)
    if shape != drafter.config:
        drafter = _grown(drafter, shape, config.seed)
    drafter.config = dataclasses.replace(drafter.config, target=target.identity)
    if drafter.config.trained_positions:
        record_length(drafter, examples)
    _grow_vocabulary(drafter, config, examples)
    return drafter.to(target.device).requires_grad_(requires_grad=True)


def _with_more_layers(shape: DrafterConfig, config: TrainConfig) -> DrafterConfig:
    """The config with as many layers of SA as `config.sizes` asks for."""
    had, wanted = shape.self_attention_layers, config.sizes.sa_layers
    if wanted and wanted < had:
        raise InputError(
            f"sizes.sa_layers={wanted}: initial={config.initial} has {had}, and a run can only add "
            "layers; 0 keeps them."
        )
    return dataclasses.replace(shape, self_attention_layers=wanted or had)


def _grown(drafter: MoADrafter, shape: DrafterConfig, seed: int) -> MoADrafter:
    """The drafter with further layers of SA, which do nothing at first."""
    torch.manual_seed(seed)
    grown = MoADrafter(shape, drafter.draft_token_ids)
    random_weights(grown)
    make_later_layers_identity(grown)
    grown.load_state_dict(drafter.state_dict(), strict=False)  # new layers are not in it
    grown.head_moment = drafter.head_moment
    return grown


def record_length(drafter: MoADrafter, examples: Sequence[Example]) -> None:
    """Raise `trained_positions` to the longest example, whose keys training reads as they are."""
    longest = max(map(len, examples), default=0)
    if longest > drafter.config.trained_positions:
        drafter.config = dataclasses.replace(drafter.config, trained_positions=longest)
        drafter.encoder.fold = FoldedPositions(drafter.config)


def _grow_vocabulary(drafter: MoADrafter, config: TrainConfig, examples: Sequence[Example]) -> None:
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
