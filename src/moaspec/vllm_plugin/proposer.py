"""The proposer that vLLM instantiates and asks for drafts after each step.

Its metrics appear under vLLM's `/metrics` if `PROMETHEUS_MULTIPROC_DIR` names an empty directory
before vLLM starts, because a vLLM worker is a separate process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from prometheus_client import Counter
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
from moaspec.target.spec import TargetSpec
from moaspec.vllm_plugin import hooks
from moaspec.vllm_plugin.caches import PagedLayer
from moaspec.vllm_plugin.custom_proposer import CustomProposer
from moaspec.vllm_plugin.load_aware import LoadAwareLength
from moaspec.vllm_plugin.refusals import check_drafter
from moaspec.vllm_plugin.vllm_drafting import DrafterParts, PagedDrafter
from moaspec.vllm_plugin.vllm_settings import drafter_name
from moaspec.vllm_plugin.vllm_target_layers import DraftHead, embedding_of

logger = init_logger(__name__)

FAILURES = Counter(
    "moaspec:drafter_failures",
    "Steps of vLLM in which the drafter failed; their requests went on without drafts.",
)
SECONDS = Counter(
    "moaspec:drafter_seconds",
    "Host seconds that the drafter took, by part: encode (once per verified token) and draft.",
    ["part"],
)
SECONDS_OF = {part: SECONDS.labels(part) for part in ("encode", "draft")}

NO_DRAFT: list[int] = []
ALL_TOKENS = 2**31  # a length beyond that of any request


class VLLMMoAProposer(CustomProposer):
    """Drafts chains with a Mixture-of-Attentions drafter inside vLLM.

    vLLM constructs it, passes it the target (`load_model`) and calls `propose` after every step.
    `MoAWorker` calls `start` and `finish_step`.

    Raises:
        ServingError: this vLLM version or one of its settings is not supported.
        UnsupportedTargetError: the target's keys and values cannot be captured.
    """

    runner_hooks = hooks.RUNNER_HOOKS

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._depths, self._chooser = _depths(vllm_config), _chooser(vllm_config)
        self._name = drafter_name(vllm_config.additional_config)
        self._parts: DrafterParts | None = None
        self._drafter: PagedDrafter | None = None
        self._vllm_sample: Callable[[Tensor, Any], Any] | None = None

    def load_model(self, target: Any) -> None:
        """Load the drafter, connect it to the target and request its caches from vLLM.

        Raises:
            CheckpointError: the drafter is damaged, is for another target or needs N > 0.
            ServingError: the target's keys and values cannot be captured in this vLLM.
        """
        for name in hooks.TARGET_HOOKS:
            hooks.require(target, name)
        capture = self.capture(target, may_hold=self._eager)
        like = self.empty_like_target(target)
        drafter = self._load_drafter().to(like).requires_grad_(False)
        index = len(capture)
        self._parts = DrafterParts(
            drafter=packed_copy(drafter, exact=[drafter.encoder]),
            embed=embedding_of(target, target.embed_input_ids, VocabParallelEmbedding),
            head=DraftHead(target, drafter.draft_token_ids, tensor_model_parallel_all_reduce),
            self_attention=self._paged(index, drafter.config.self_attention, "self_attn"),
            cross_attention=self._paged(index + 1, drafter.config.cross_attention, "cross_attn"),
            capture=capture,
        )

    @property
    def _eager(self) -> bool:
        return self.vllm_config.compilation_config.mode == CompilationMode.NONE

    def start(self, runner: Any) -> None:
        """Connect the drafter to vLLM's caches, and work around wrong temperatures if needed.

        Raises:
            ServingError: the model runner lacks one of `runner_hooks`.
        """
        super().start(runner)
        assert self._parts is not None, "vLLM loads the model before it allocates caches"
        self._drafter = PagedDrafter(self._parts, runner)
        if not hooks.verifies_sampled_drafts(runner.positions.device):
            self._vllm_sample, runner._sample = runner._sample, self._sample
            logger.warning(
                "vLLM %s applies no request's temperature to drafted tokens here. Steps are "
                "drafted while all of their requests are greedy.",
                hooks.installed_version(),
            )

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, *_: Any, **__: Any
    ) -> list[list[int]]:
        """Draft for each request of the batch, in order; an unfinished prompt gets no draft.

        Args:
            sampled_token_ids: tokens that the step verified and sampled, per request.
            num_tokens_no_spec: number of tokens of each request, including the sampled ones.
        """
        drafts: list[list[int]] = [NO_DRAFT for _ in sampled_token_ids]
        if self._drafter is None:
            return drafts
        lengths_R = num_tokens_no_spec[: len(drafts)].tolist()
        newest = {row: lengths_R[row] - 1 for row, new in enumerate(sampled_token_ids) if new}
        with self._failures_logged():
            # All computed tokens of an unfinished prompt are verified.
            self._encode([newest.get(row, ALL_TOKENS) for row in range(len(drafts))])
            depth = self._depth(lengths_R, [len(new) for new in sampled_token_ids])
            if rows := self._to_draft(newest, depth):
                tokens = [sampled_token_ids[row][-1] for row in rows]
                with _timed("draft"):
                    chains = self._drafter.draft(rows, tokens, [newest[row] for row in rows], depth)
                for row, chain in zip(rows, chains, strict=True):
                    drafts[row] = chain
        return drafts

    def _depth(self, lengths_R: list[int], emitted_R: list[int]) -> int:
        if self._chooser is None:
            return self._depths[len(lengths_R)]
        return self._chooser.choose(lengths_R, emitted_R, time.perf_counter())

    def _sample(self, logits_NV: Tensor, metadata: Any) -> Any:
        """Sample as vLLM does, but verify no drafts in a step with a sampled request.

        Such a step can still have drafts: of greedy requests that a sampled one joined, and drafts
        that vLLM adds itself after a prefix cache hit or near a text's limit.

        Args:
            logits_NV: logits of each request's newest token, then of its drafts.
            metadata: vLLM's metadata of the drafts; None if there are none.
        """
        assert self._vllm_sample is not None
        if metadata is not None and not self.runner.input_batch.all_greedy:
            newest_R = np.cumsum([0, *metadata.num_draft_tokens[:-1]])
            newest_R += np.arange(len(newest_R))
            logits_NV, metadata = logits_NV[torch.from_numpy(newest_R)], None
        return self._vllm_sample(logits_NV, metadata)

    def finish_step(self) -> None:
        """Encode a step for which vLLM requested no drafts, because a text is near its limit.

        Other requests may still reuse its blocks by prefix.
        """
        if self._parts is not None and self._parts.capture.pending:
            with self._failures_logged():
                self._encode(None)

    def _to_draft(self, newest: dict[int, int], depth: int) -> list[int]:
        """Requests whose newest tokens at these positions leave room for a draft of `depth`."""
        assert self._drafter is not None
        batch = self.runner.input_batch
        if self._vllm_sample is not None and not batch.all_greedy:
            return []
        room_R = self._drafter.room(batch.num_reqs)
        return [row for row, last in newest.items() if 0 < depth <= room_R[row] - last]

    def _encode(self, lengths_R: list[int] | None) -> None:
        assert self._parts is not None
        assert self._drafter is not None
        # Reset before encoding: a step that fails is not encoded a second time.
        self._parts.capture.pending = False
        with _timed("encode"):
            self._drafter.encode(lengths_R)

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Log an exception of the drafter: requests continue without drafts."""
        try:
            yield
        except Exception:
            FAILURES.inc()
            logger.exception("The drafter failed; this step's requests go on without drafts.")

    def _load_drafter(self) -> MoADrafter:
        model_config = self.vllm_config.model_config
        tokenizer = None
        if not model_config.skip_tokenizer_init:
            tokenizer = load_tokenizer(model_config.tokenizer)
        config = model_config.hf_config
        identity = TargetSpec(config, tokenizer, name=self._name, dtype=None).identity
        drafter = load_checkpoint(find_drafter(self._name), identity, config)
        check_drafter(drafter)
        return drafter

    def _paged(self, index: int, config: LayerConfig, kind: str) -> PagedLayer:
        return PagedLayer(
            config,
            prefix=f"moa_spec.layers.{index}.{kind}.attn",
            cache_config=self.vllm_config.cache_config,
        )


def _depths(vllm_config: Any) -> list[int]:
    """Draft length by the number of requests in a step."""
    settings, most = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
    depth = int(settings.num_speculative_tokens)
    schedule = settings.num_speculative_tokens_per_batch_size
    if schedule is None:
        return [depth] * (most + 1)
    return build_dynamic_sd_schedule_lookup(schedule, most, depth)


def _chooser(vllm_config: Any) -> LoadAwareLength | None:
    """Chooses draft lengths, unless vLLM's option does, or several ranks must choose alike."""
    settings = vllm_config.speculative_config
    if settings.num_speculative_tokens_per_batch_size is not None:
        return None
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        return None
    return LoadAwareLength(int(settings.num_speculative_tokens))


@contextmanager
def _timed(part: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    SECONDS_OF[part].inc(time.perf_counter() - started)


MoAProposer = VLLMMoAProposer
"""The name that vLLM's options had before; kept for options that were written out."""
