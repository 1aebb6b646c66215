"""Draft quality on held-out conversations, measured in training passes.

Held-out responses are cut into blocks of `BLOCK_LENGTH`. In each block the pass drafts a greedy
chain, fed with the response's own tokens. A chain that agrees with the response would read the same
tokens, so the length of the agreeing prefix equals that of real decoding. **Simulated tau** is the
mean of this length over complete blocks, plus 1 for the bonus token. EAGLE has none, because its
chain reads its own predictions.

Legend: M queries with loss, R ranks, X blocks, E hidden size, V draft vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moaspec_train.data_order import TrainBatch, fixed_blocks, split_batch
from moaspec_train.dataset.examples import Example, collate
from moaspec_train.parallelism import ParallelStrategy, sum_over_processes
from moaspec_train.progress import reported
from moaspec_train.students.losses import MAX_CHUNK, ExitStates
from moaspec_train.students.students import Student

BLOCK_LENGTH = 8  # drafts of a simulated chain
NUM_RANKS = 8  # number of most likely drafts whose acceptance is measured


@dataclass(frozen=True)
class HeldOutMetrics:
    """Metrics of one exit on held-out conversations."""

    # By draft step, fraction of most likely drafts that are the target's choice; the drafter reads
    # the response's tokens before them.
    accuracy: list[float]
    tau: float | None  # simulated tau; None if no response fills a block
    # By rank, fraction of drafts that are the target's choice, over all steps.
    acceptance: tuple[float, ...]
    moment_EE: Tensor | None  # second moment of the states before the head; None without queries


@torch.no_grad()
def measure_held_out(
    student: Student,
    strategy: ParallelStrategy,
    examples: Sequence[Example],
    ids: Sequence[int],
    *,
    step: int,
    batch_size: int,
) -> list[HeldOutMetrics]:
    """Measure every exit.

    Args:
        strategy: has the student's wrapped module, and its processes.
        ids: of the held-out examples; an empty list gives no metrics.
        step: of the run.
        batch_size: examples of one pass, over all processes.
    """
    sums: list[Tensor] = []
    accelerator, device = strategy.accelerator, student.target.device
    student.module.eval()
    by_length = sorted(ids, key=lambda i: len(examples[i]))
    starts = range(0, len(by_length), batch_size)
    for start in reported(starts, "Measured", "batches", len(starts), lambda _: 1):
        batch = collate(examples, by_length[start : start + batch_size])
        whole = TrainBatch(batch, fixed_blocks(batch, BLOCK_LENGTH), None)
        part = split_batch(whole, accelerator.num_processes)[accelerator.process_index]
        result = student.run(strategy.model, part.prepared(device).to(device), step)
        found = [_sums(student, states, part) for states in result.exits]
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
    student.module.train()
    return [_metrics(sum_over_processes(accelerator, values).cpu()) for values in sums]


def _sums(student: Student, states: ExitStates, part: TrainBatch) -> Tensor:
    """In one row: hits by step, queries by step, hits by rank, agreeing drafts, blocks, moments."""
    drafted, best = [], []
    for mine, target in zip(
        states.drafted_ME.split(MAX_CHUNK), states.target_ME.split(MAX_CHUNK), strict=True
    ):
        logits_MV = states.logits(mine)
        drafted.append(logits_MV.topk(min(NUM_RANKS, logits_MV.shape[-1])).indices)
        best.append(student.full_head(target).argmax(-1))
    drafted_MR, best_M = torch.cat(drafted).cpu(), torch.cat(best).cpu()
    if student.draft_token_ids is not None:
        drafted_MR = student.draft_token_ids.cpu()[drafted_MR]
    right_MR = (drafted_MR == best_M[:, None]).float()
    loss_BT = part.blocks.loss_BT
    written_M = part.batch.input_ids_BT.roll(-1, dims=1)[loss_BT]
    step_M = part.blocks.step_BT[loss_BT]
    agreed_M = drafted_MR[:, 0] == written_M
    prefixes = agreeing_prefix_lengths(agreed_M, step_M)
    return torch.cat(
        (
            torch.zeros(BLOCK_LENGTH).index_add_(0, step_M, right_MR[:, 0]),
            torch.zeros(BLOCK_LENGTH).index_add_(0, step_M, torch.ones(len(step_M))),
            F.pad(right_MR.sum(0), (0, NUM_RANKS - right_MR.shape[1])),
            torch.tensor([float(prefixes.sum()), float(len(prefixes))]),
            (states.drafted_ME.T @ states.drafted_ME).flatten().cpu(),
        )
    ).double()


def agreeing_prefix_lengths(agreed_M: Tensor, step_M: Tensor) -> Tensor:
    """Length of the agreeing prefix of every complete block, (X,)."""
    if not len(step_M):
        return step_M
    block_M = (step_M == 0).cumsum(0) - 1
    agreed_X8 = torch.zeros(int(block_M[-1]) + 1, BLOCK_LENGTH, dtype=torch.long)
    agreed_X8[block_M, step_M] = agreed_M.long()
    whole_X = torch.bincount(block_M, minlength=len(agreed_X8)) == BLOCK_LENGTH
    return agreed_X8[whole_X].cumprod(1).sum(1)


def _metrics(sums: Tensor) -> HeldOutMetrics:
    sizes = [BLOCK_LENGTH, BLOCK_LENGTH, NUM_RANKS, 2]
    hits, counts, ranks, rest, products = sums.split([*sizes, len(sums) - sum(sizes)])
    agreed, blocks = rest.tolist()
    moment_EE = (products / counts.sum()).unflatten(0, (math.isqrt(len(products)), -1)).float()
    by_rank = (ranks / counts.sum().clamp(min=1)).tolist()
    accuracy = (hits / counts.clamp(min=1)).tolist()
    tau = round(agreed / blocks + 1, 4) if blocks else None
    acceptance = tuple(round(value, 4) for value in by_rank)
    accuracy = [round(value, 4) for value in accuracy]
    return HeldOutMetrics(accuracy, tau, acceptance, moment_EE if counts.any() else None)
