"""The class that vLLM instantiates (`method: custom_class`) and asks for drafts after each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CompilationMode
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from moaspec.backends.fast_drafter import packed_copy
from moaspec.generation.drafters import find_drafter
from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint
from moaspec.model.drafter_config import LayerConfig
from moaspec.model.moa import MoADrafter
from moaspec.target.registry import load_tokenizer
from moaspec.target.spec import identity_of
from moaspec.vllm_plugin import hooks
from moaspec.vllm_plugin import vllm_metrics as metrics
from moaspec.vllm_plugin.caches import PagedLayer
from moaspec.vllm_plugin.custom_classes import Joined
from moaspec.vllm_plugin.draft_head import TrimmedHead
from moaspec.vllm_plugin.embedding import embedding_of
from moaspec.vllm_plugin.refusals import check_drafter
from moaspec.vllm_plugin.vllm_drafting import Drafting, DraftInputs, Roots
from moaspec.vllm_plugin.vllm_settings import drafter_name

logger = init_logger(__name__)

NO_DRAFT: list[int] = []
EVERYTHING = 2**31
"""More tokens than any request has."""


class MoAProposer(Joined):
    """Drafts chains with a Mixture-of-Attentions drafter inside vLLM.

    vLLM constructs it, hands it the target (`load_model`), and calls `propose` after every step;
    our worker calls `start` and `settle`.

    Args:
        vllm_config: vLLM's whole configuration.

    Raises:
        ServingError: this vLLM, or a setting of it, cannot be drafted for.
        UnsupportedTargetError: the target's keys and values cannot be captured.
    """

    runner_hooks = hooks.RUNNER_HOOKS

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._depths = _depths(vllm_config)
        self._name = drafter_name(vllm_config.additional_config)
        self._parts: DraftInputs | None = None
        self._drafting: Drafting | None = None
        self._verify: Callable[[Tensor, Any], Any] | None = None

    def load_model(self, target: Any) -> None:
        """Load the drafter, join it to the target, and ask vLLM for its caches.

        Raises:
            CheckpointError: the drafter is damaged, for another target, or needs N > 0.
            ServingError: the target's keys and values cannot be read in this vLLM.
        """
        for name in hooks.TARGET_HOOKS:
            hooks.require(target, name, owner_name=type(target).__name__)
        capture, like = self.capture(target, may_hold=self._eager), self.like(target)
        drafter = self._load_drafter().to(like).requires_grad_(False)
        index = len(capture)
        self._parts = DraftInputs(
            drafter=packed_copy(drafter, exact=[drafter.encoder]),
            embed=embedding_of(target, target.embed_input_ids, VocabParallelEmbedding),
            head=TrimmedHead(target, drafter.draft_token_ids, tensor_model_parallel_all_reduce),
            text=self._paged(index, drafter.config.self_attention, "self_attn"),
            memory=self._paged(index + 1, drafter.config.cross_attention, "cross_attn"),
            capture=capture,
        )

    @property
    def _eager(self) -> bool:
        return self.vllm_config.compilation_config.mode == CompilationMode.NONE

    def start(self, runner: Any) -> None:
        """Find everything that a step needs; vLLM's caches are allocated.

        Raises:
            ServingError: this vLLM's model runner lacks something.
        """
        super().start(runner)
        assert self._parts is not None, "vLLM loads the model before it allocates caches"
        self._drafting = Drafting(self._parts, runner)
        if not hooks.verifies_sampled_drafts(runner.positions.device):
            self._verify, runner._sample = runner._sample, self._sample
            logger.warning(
                "vLLM %s applies no request's temperature to drafted tokens here. Steps are "
                "drafted while all of their requests are greedy.",
                hooks.installed_version(),
            )

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """Drafts for each request of the batch, in its order; none for one still in its prompt.

        Args:
            sampled_token_ids: what the step verified and sampled, per request.
            num_tokens_no_spec: tokens of each request, those included.
        """
        drafts: list[list[int]] = [NO_DRAFT for _ in sampled_token_ids]
        if self._drafting is None:
            return drafts
        lengths_R = num_tokens_no_spec[: len(drafts)].tolist()
        newest = {row: lengths_R[row] - 1 for row, new in enumerate(sampled_token_ids) if new}
        with self._never_failing():
            # Of a request that is still in its prompt, all that was computed is verified.
            self._encode([newest.get(row, EVERYTHING) for row in range(len(drafts))])
            depth = self._depths[len(drafts)]
            rows = self._to_draft(newest, depth)
            tokens = [sampled_token_ids[row][-1] for row in rows]
            roots = Roots(rows=rows, tokens=tokens, positions=[newest[row] for row in rows])
            for row, chain in zip(rows, self._chains(roots, depth), strict=True):
                drafts[row] = chain
        return drafts

    def _sample(self, logits_NV: Tensor, metadata: Any) -> Any:
        """As vLLM does it, but no drafts are verified in a step that has a temperature.

        There may be some all the same: those of greedy requests that another has joined, and those
        that vLLM fills in itself, where a prompt's blocks are found or a text is near its limit.

        Args:
            logits_NV: of each request those of its newest token, then of its drafts.
            metadata: vLLM's, of the drafts; None: there are none.
        """
        assert self._verify is not None
        if metadata is not None and not self.runner.input_batch.all_greedy:
            newest_R = np.cumsum([0, *metadata.num_draft_tokens[:-1]])
            newest_R += np.arange(len(newest_R))
            logits_NV, metadata = logits_NV[torch.from_numpy(newest_R)], None
        return self._verify(logits_NV, metadata)

    def settle(self) -> None:
        """Encode a step for which vLLM wanted no drafts, because a text is near its limit.

        Other requests may yet find its blocks by their prefix.
        """
        if self._parts is not None and self._parts.capture.pending:
            with self._never_failing():
                self._encode(None)

    def _to_draft(self, newest: dict[int, int], depth: int) -> list[int]:
        """Rows with room for drafts, and drafts that can be verified.

        Args:
            newest: positions of rows' newest tokens.
            depth: how many tokens would be drafted.
        """
        assert self._drafting is not None
        batch = self.runner.input_batch
        if self._verify is not None and not batch.all_greedy:
            return []
        room_R = self._drafting.room(batch.num_reqs)
        return [row for row, last in newest.items() if 0 < depth <= room_R[row] - last]

    def _encode(self, lengths_R: list[int] | None) -> None:
        assert self._parts is not None
        assert self._drafting is not None
        # Whatever comes of it: a step is encoded once, or not at all.
        self._parts.capture.pending = False
        with _timed("encode"):
            self._drafting.encode(lengths_R)

    def _chains(self, roots: Roots, depth: int) -> list[list[int]]:
        assert self._drafting is not None
        if not roots.rows:
            return []
        with _timed("draft"):
            return self._drafting.draft(roots, depth)

    @contextmanager
    def _never_failing(self) -> Iterator[None]:
        """Requests do not depend on drafts, so they must not suffer from a failing drafter."""
        try:
            yield
        except Exception:
            metrics.FAILURES.inc()
            logger.exception("The drafter failed; this step's requests go on without drafts.")

    def _load_drafter(self) -> MoADrafter:
        model_config = self.vllm_config.model_config
        tokenizer = None
        if not model_config.skip_tokenizer_init:
            tokenizer = load_tokenizer(model_config.tokenizer)
        config = model_config.hf_config
        drafter = load_checkpoint(find_drafter(self._name), identity_of(config, tokenizer), config)
        check_drafter(drafter)
        return drafter

    def _paged(self, index: int, config: LayerConfig, kind: str) -> PagedLayer:
        return PagedLayer(
            config,
            prefix=f"moa_spec.layers.{index}.{kind}.attn",
            cache_config=self.vllm_config.cache_config,
        )


def _depths(vllm_config: Any) -> list[int]:
    """Tokens to draft, by the number of requests in a step."""
    settings, most = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
    depth = int(settings.num_speculative_tokens)
    schedule = settings.num_speculative_tokens_per_batch_size
    if schedule is None:
        return [depth] * (most + 1)
    return build_dynamic_sd_schedule_lookup(schedule, most, depth)


@contextmanager
def _timed(part: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    metrics.SECONDS_OF[part].inc(time.perf_counter() - started)
