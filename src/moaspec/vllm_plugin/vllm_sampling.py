"""vLLM's sampling of a step, replaced by the one law, for drafts that devices sent.

vLLM's own rejection sampler would choose differently than devices expect as soon as a request has
a temperature, penalties or a grammar. Here its logits are walked by the same function that walks
those of a local target (`decode.decide`), so the text is that of every other deployment.

Legend: N logits of a step (of each request the newest token's, then its drafts'), V vocabulary,
T tokens, L target layers, G KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from moaspec.drafting.draft_tree import DraftTree
from moaspec.drafting.protocols import VerifyRequest
from moaspec.engine.accept import Acceptance, accept
from moaspec.vllm_plugin.capture import KVCapture
from moaspec.vllm_plugin.custom_classes import Joined
from moaspec.vllm_plugin.vllm_settings import SECTION

NOTHING = -1
"""vLLM's filler behind the tokens that a request brings out of a step."""


@dataclass
class DraftedRequest:
    """What is asked of one request of vLLM's.

    Attributes:
        request: its tree is the chain that vLLM verifies, as far as it does.
        text: all tokens up to the newest; accepted ones are appended.
        num_steps: steps of vLLM's so far.
        num_read: tokens whose keys and values vLLM had before; None as long as no step was run.
        read: keys and values of those after them, (T, L, G, 2 D) each.
        outcome: what became of it; None as long as its prompt is being read.
    """

    request: VerifyRequest
    text: list[int]
    num_steps: int = 0
    num_read: int | None = None
    read: list[Tensor] = field(default_factory=list)
    outcome: Acceptance | Exception | None = None


@dataclass(frozen=True)
class _SampledRow:
    """A request's part of a step."""

    asked: DraftedRequest
    tokens: slice
    logits: slice
    partial: bool


class SeededSampling(Joined):
    """Decides for vLLM, and drafts nothing: devices do.

    Attributes:
        asked: by vLLM's request id, what its next steps are to decide.
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
        self.asked: dict[str, DraftedRequest] = {}
        self._capture: KVCapture | None = None

    def load_model(self, target: Any) -> None:
        """Read keys and values from now on, where somebody wants them."""
        if self.vllm_config.additional_config[SECTION]["features"]:
            self._capture = self.capture(target)

    def start(self, runner: Any) -> None:
        """Take over sampling."""
        super().start(runner)
        runner._sample = self._sample

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """No drafts."""
        return [[] for _ in sampled_token_ids]

    def _sample(self, logits_NV: Tensor, metadata: Any) -> SamplerOutput:
        """What each request of the step brings: (R, W) int32, filled up with `NOTHING`."""
        batch = self.runner.input_batch
        drafted = [0] * batch.num_reqs if metadata is None else metadata.num_draft_tokens
        rows = self._rows(drafted)
        whole = [row for row in rows if not row.partial]
        _decide([row.asked for row in whole], [_own(row, logits_NV) for row in whole])
        ids = torch.full((len(rows), max(drafted) + 1), NOTHING, dtype=torch.int32)
        for place, row in enumerate(rows):
            tokens = _brought(row.asked)
            ids[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            self._keep(row, place)
        return SamplerOutput(ids.to(logits_NV.device), logprobs_tensors=None)

    def _rows(self, drafted: Sequence[int]) -> list[_SampledRow]:
        starts, partial = self.runner.query_start_loc.np, self.runner.discard_request_mask.np
        rows, first = [], 0
        for place, (name, drafts) in enumerate(
            zip(self.runner.input_batch.req_ids, drafted, strict=True)
        ):
            rows.append(
                _SampledRow(
                    self.asked[name],
                    slice(int(starts[place]), int(starts[place + 1])),
                    slice(first, first + 1 + drafts),
                    bool(partial[place]),
                )
            )
            first += 1 + drafts
        return rows

    def _keep(self, row: _SampledRow, place: int) -> None:
        """Copy keys and values of the row's verified tokens before the next step replaces them."""
        asked, outcome = row.asked, row.asked.outcome
        asked.num_steps += 1
        if self._capture is None or not asked.request.encode:
            return
        if asked.num_read is None:
            asked.num_read = int(self.runner.input_batch.num_computed_tokens_cpu[place])
        drafts = row.logits.stop - row.logits.start - 1
        accepted = len(outcome.accepted) if isinstance(outcome, Acceptance) else 0
        stop = row.tokens.stop if row.partial else row.tokens.stop - drafts + accepted
        asked.read.append(self._capture.staged_NLGK[row.tokens.start : stop].clone())


def _own(row: _SampledRow, logits_NV: Tensor) -> Tensor:
    """The logits of the row's newest token and of those of its drafts that vLLM has verified.

    They are fewer where the text is near its limit. And vLLM may have added some of its own, to a
    request whose prompt it has just read.
    """
    request, drafts = row.asked.request, row.logits.stop - row.logits.start - 1
    tree = request.tree
    if drafts < len(tree.tokens):
        tree = DraftTree(tree.tokens[:drafts], tree.parents[:drafts])
        row.asked.request = replace(request, tree=tree)
    return logits_NV[row.logits][: 1 + len(tree.tokens)]


def _decide(asked: Sequence[DraftedRequest], logits: Sequence[Tensor]) -> None:
    """Outcomes of all requests; where that fails, of each alone, so that one harms no other."""
    if not asked:
        return
    texts = [list(one.text) for one in asked]
    try:
        decisions = accept([one.request for one in asked], texts, torch.cat(list(logits)).float())
    except Exception as error:  # noqa: BLE001 - whoever asked is told
        if len(asked) == 1:
            asked[0].outcome = error
            return
        for one, own in zip(asked, logits, strict=True):
            _decide([one], [own])
        return
    for one, text, decision in zip(asked, texts, decisions, strict=True):
        one.text, one.outcome = text, decision


def _brought(asked: DraftedRequest) -> list[int]:
    """Tokens that a request brings; something has to stand there where it brings none."""
    outcome = asked.outcome
    if not isinstance(outcome, Acceptance):
        return [0]
    tokens = asked.request.tree.tokens
    return [*(tokens[node] for node in outcome.accepted), outcome.next_token]
