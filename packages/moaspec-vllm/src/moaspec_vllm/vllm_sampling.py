"""Seeded sampling inside vLLM, for drafts that devices sent.

vLLM's rejection sampler chooses other tokens than devices expect if a request has a temperature,
penalties or a grammar. This class applies `engine.accept` to vLLM's logits, as for a local target,
so the text equals that of every other deployment.

Legend: N logits of a step (for each request those of its newest token, then of its drafts),
V vocabulary, T tokens, L target layers, K one layer's key and value.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tp_group, tensor_model_parallel_all_gather
from vllm.v1.outputs import SamplerOutput

from moaspec.backends import fast_sampling  # noqa: F401 - sampling by kernels
from moaspec.engine.accept import accept
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_vllm.custom_proposer import CustomProposer
from moaspec_vllm.paged_drafter.cache_reader import CacheReader, require_kept
from moaspec_vllm.paged_drafter.caches import CacheGroup
from moaspec_vllm.vllm_settings import CONFIG_KEY

PADDING = -1  # vLLM's padding after the tokens that a step gives a request


@dataclass
class PendingVerification:
    """The verification that the next steps of one vLLM request have to do."""

    name: str  # vLLM's id of the request
    request: VerifyRequest  # its tree is the chain that vLLM verifies
    text: list[int]  # all tokens up to the newest. Accepted tokens are appended.
    # Of the tokens after the request's `num_verified`, (T, L, K); None until
    # there is an outcome, and where no drafter reads them.
    keys_values: Tensor | None = None
    # The result or error; None while vLLM reads the prompt.
    outcome: VerifyResult | Exception | None = None


@dataclass(frozen=True)
class _SampledRow:
    """The part of a step that belongs to one request."""

    pending: PendingVerification  # its verification
    stop: int  # number of its tokens that are in the cache after this step
    logits: slice  # its part of the step's logits
    partial: bool  # whether its prompt is not complete after this step


class SeededSampler(CustomProposer):
    """Replaces vLLM's sampling. It drafts nothing, because devices do.

    With tensor parallelism every rank has one, and all decide alike: they have the same logits.
    """

    runner_hooks = (
        "_sample",
        "discard_request_mask.np",
        "input_batch.num_computed_tokens_cpu",
        "input_batch.num_reqs",
        "input_batch.req_ids",
        "query_start_loc.np",
    )

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._pending: dict[str, PendingVerification] = {}
        self._num_rows = 0  # rows of all steps
        self._layers = list[Any]()
        self._reader: CacheReader | None = None

    def load_model(self, _: Any) -> None:
        """Find the target's attention layers if a drafter's encoder reads their keys and values."""
        if self.vllm_config.additional_config[CONFIG_KEY]["features"]:
            self._layers = self.target_layers()

    def start(self, runner: Any) -> None:
        """Replace the model runner's sampling function.

        Raises:
            ServingError: the target's keys and values cannot be read from its caches.
        """
        super().start(runner)
        if multiprocessing.parent_process() is not None:
            # A stop may reach all processes of a group, while the server lets texts end. A rank
            # ends when the server closes its pipe.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        runner._sample = self._sample
        if self._layers:
            require_kept(runner, self._layers)
            self._reader = CacheReader(self._layers, self.share)
            self._group = CacheGroup(runner, self._layers[0].layer_name)

    def begin(self, batch: Sequence[PendingVerification]) -> None:
        """Replace the pending verifications."""
        self._pending = {pending.name: pending for pending in batch}

    def progress(self) -> tuple[int, list[PendingVerification]]:
        """Number of rows of all steps, and on the first rank verifications that have ended."""
        ended = [one for one in self._pending.values() if one.outcome is not None]
        for one in ended:
            del self._pending[one.name]
        return self._num_rows, [] if get_tp_group().rank_in_group else ended

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Return no drafts, as devices send them."""
        return [[] for _ in sampled_token_ids]

    def _sample(self, logits_NV: Tensor, metadata: Any) -> SamplerOutput:
        """Tokens that the step gives each request: (R, W) int32, padded with `PADDING`."""
        batch = self.runner.input_batch
        drafted = [0] * batch.num_reqs if metadata is None else metadata.num_draft_tokens
        rows = self._rows(drafted)
        complete = [row for row in rows if not row.partial]
        _accept(
            [row.pending for row in complete], [_row_logits(row, logits_NV) for row in complete]
        )
        ids = torch.full((len(rows), max(drafted) + 1), PADDING, dtype=torch.int32)
        for place, row in enumerate(rows):
            tokens = _new_tokens(row.pending)
            ids[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            self._read_row(row, place)
        self._num_rows += len(rows)
        return SamplerOutput(ids.to(logits_NV.device), logprobs_tensors=None)

    def _rows(self, drafted: Sequence[int]) -> list[_SampledRow]:
        batch, partial = self.runner.input_batch, self.runner.discard_request_mask.np
        counts = np.diff(self.runner.query_start_loc.np[: batch.num_reqs + 1])
        stops = batch.num_computed_tokens_cpu[: batch.num_reqs] + counts
        rows, first = [], 0
        for place, (name, drafts) in enumerate(zip(batch.req_ids, drafted, strict=True)):
            rows.append(
                _SampledRow(
                    self._pending[name],
                    int(stops[place]),
                    slice(first, first + 1 + drafts),
                    bool(partial[place]),
                )
            )
            first += 1 + drafts
        return rows

    def _read_row(self, row: _SampledRow, place: int) -> None:
        """Read the keys and values of newly verified tokens before later steps overwrite them."""
        request, outcome = row.pending.request, row.pending.outcome
        if self._reader is None or not request.encode or not isinstance(outcome, VerifyResult):
            return
        drafts = row.logits.stop - row.logits.start - 1
        position_N = np.arange(request.num_verified, row.stop - drafts + len(outcome.accepted))
        slots_N = torch.from_numpy(self._group.slots_of(np.array(place), position_N))
        slots_N = slots_N.to(self._reader.device)
        row.pending.keys_values = self._reader.read(slots_N, tensor_model_parallel_all_gather)


def _row_logits(row: _SampledRow, logits_NV: Tensor) -> Tensor:
    """Logits of the row's newest token and of its drafts that vLLM has verified.

    Near a text's limit vLLM verifies fewer drafts than it got. To a request whose prompt it has
    just read, it may add drafts of its own, which are ignored.
    """
    request, drafts = row.pending.request, row.logits.stop - row.logits.start - 1
    tree = request.tree
    if drafts < len(tree.tokens):
        tree = DraftTree(tree.tokens[:drafts], tree.parents[:drafts])
        row.pending.request = replace(request, tree=tree)
    return logits_NV[row.logits][: 1 + len(tree.tokens)]


def _accept(batch: Sequence[PendingVerification], logits: Sequence[Tensor]) -> None:
    """Set the outcome of all requests. If that fails, retry each alone to find the faulty one."""
    if not batch:
        return
    texts = [list(pending.text) for pending in batch]
    requests = [pending.request for pending in batch]
    try:
        results = accept(requests, texts, torch.cat(list(logits)).float())
    except Exception as error:  # noqa: BLE001 - the request's caller raises it
        if len(batch) == 1:
            batch[0].outcome = error
            return
        for pending, own in zip(batch, logits, strict=True):
            _accept([pending], [own])
        return
    for pending, text, result in zip(batch, texts, results, strict=True):
        pending.text, pending.outcome = text, result


def _new_tokens(pending: PendingVerification) -> list[int]:
    """Tokens that a step gives a request; one placeholder token if there are none."""
    outcome = pending.outcome
    if not isinstance(outcome, VerifyResult):
        return [0]
    tokens = pending.request.tree.tokens
    return [*(tokens[node] for node in outcome.accepted), outcome.next_token]
