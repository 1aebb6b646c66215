"""Students of the baseline drafters.

Legend: B batch, T tokens, M queries with loss, E hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from moaspec.model.checkpoint.baseline_checkpoint import KINDS, Baseline, save_baseline
from moaspec.model.moa import positions
from moaspec.target.target import Target
from moaspec.train.data_order import TrainBatch
from moaspec.train.dataset.examples import frequent_tokens
from moaspec.train.run_config import TrainConfig, stack_config
from moaspec.train.students.losses import ExitStates
from moaspec.train.students.students import Student, StudentOutput
from moaspec.train.students.target_activations import TargetActivations
from moaspec.train.students.warm_start import random_weights


class BaselineStudent(Student):
    """EAGLE's head, or an independent small language model.

    Their attention ignores blocks, which only select the queries with loss.
    """

    def __init__(self, target: Target, activations: TargetActivations, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        vocabulary = frequent_tokens(
            activations.examples, size=config.sizes.draft_vocab, always=target.stop_token_ids
        )
        module: Baseline = KINDS[config.drafter](stack_config(target, config), vocabulary)
        random_weights(module)
        module.float().to(target.device)
        super().__init__(module, target, activations, config, save_baseline)
        # In real chains EAGLE reads its own predictions, in training the target's states.
        self.simulates_chain = config.drafter == "independent"

    def run(self, model: nn.Module, part: TrainBatch, step: int) -> StudentOutput:  # noqa: ARG002
        """Run over whole texts; EAGLE reads the target's states."""
        batch = part.batch
        hidden_BTE = self._activations.final_states(batch).float()
        mask_BT, loss_BT = batch.attention_mask_BT, part.blocks.loss_BT
        inputs = [self._target.embed(batch.input_ids_BT).float()]
        if self.module.kind == "eagle":
            inputs.append(hidden_BTE)
        states_BTE = model(*inputs, positions(mask_BT), mask_BT)
        found = ExitStates(states_BTE[loss_BT].float(), hidden_BTE[loss_BT], self._head, self._head)
        return StudentOutput([found])
