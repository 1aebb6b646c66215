"""Blocks that begin where rounds of the current drafter would begin.

A real round begins after the first token that the previous round did not draft. Such tokens are
harder to predict than random ones. Rounds are simulated along the known response with the
probabilities of one pass with other blocks, because a draft depends little on its step.

Legend: B batch, T tokens, M queries with loss, V draft vocabulary.
"""

import torch
from torch import Tensor

from moaspec.train.data_order import Blocks, TrainBatch, blocks_at
from moaspec.train.students.losses import MAX_CHUNK, ExitStates

ROUND_DEPTH = 6  # drafts of a simulated round in a row, as in the paper's tree `Tree(6, 8, 62)`
MIN_ROUND_LOG_PROBABILITY = -5.0
"""Least log-probability of a path in a simulated tree. With this value, simulated rounds rank
drafters as decoding with the paper's tree does."""


@torch.no_grad()
def round_blocks(
    states: ExitStates, part: TrainBatch, draft_token_ids: Tensor | None, *, chunk: int = MAX_CHUNK
) -> Blocks:
    """Cut the responses of `part` where simulated rounds begin.

    Args:
        states: of a pass over `part`, with any blocks.
        part: rows of a step.
        draft_token_ids: the trimmed vocabulary, sorted, or None.
        chunk: number of queries whose logits are in memory at once.
    """
    batch, loss_BT = part.batch, part.blocks.loss_BT
    written_M = batch.input_ids_BT.roll(-1, dims=1)[loss_BT]
    log_BT = torch.zeros(loss_BT.shape)
    log_BT[loss_BT.cpu()] = _log_probabilities(states, written_M, draft_token_ids, chunk).cpu()
    begins = [
        _round_begins(log_T, loss_T)
        for log_T, loss_T in zip(log_BT.tolist(), loss_BT.tolist(), strict=True)
    ]
    return blocks_at(batch, torch.tensor(begins, device=loss_BT.device))


def _log_probabilities(
    states: ExitStates, written_M: Tensor, draft_token_ids: Tensor | None, chunk: int
) -> Tensor:
    """The drafter's log-probability of each query's next token; -inf if it cannot be drafted."""
    found = []
    for drafted_ME, token_M in zip(
        states.drafted_ME.split(chunk), written_M.split(chunk), strict=True
    ):
        log_MV = states.logits(drafted_ME).log_softmax(-1)
        if draft_token_ids is None:
            found.append(log_MV.gather(1, token_M[:, None])[:, 0])
            continue
        ids = draft_token_ids.to(token_M.device)
        place_M = torch.searchsorted(ids, token_M).clamp(max=len(ids) - 1)
        log_M = log_MV.gather(1, place_M[:, None])[:, 0]
        found.append(log_M.masked_fill(ids[place_M] != token_M, -torch.inf))
    return torch.cat(found)


def _round_begins(log_T: list[float], loss_T: list[bool]) -> list[bool]:
    """Mark tokens after the ends of simulated rounds, by log-probabilities of drafts."""
    begins, total, step = [False] * len(log_T), 0.0, 0
    for i, (log_probability, has_loss) in enumerate(zip(log_T, loss_T, strict=True)):
        if not has_loss:  # A prompt, or the end of a response.
            total, step = 0.0, 0
            continue
        total += log_probability
        if total < MIN_ROUND_LOG_PROBABILITY or step == ROUND_DEPTH:
            begins[i + 1], total, step = True, 0.0, 0
        else:
            step += 1
    return begins
