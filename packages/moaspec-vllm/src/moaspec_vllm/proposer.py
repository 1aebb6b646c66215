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
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from moaspec.backends.fast_drafter import packed_copy
from moaspec.generation.drafters import find_drafter
from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint
from moaspec.model.moa import MoADrafter
from moaspec.target.registry import load_tokenizer
from moaspec.target.spec import TargetSpec
from moaspec_core.checkpoint.drafter_config import LayerConfig
from moaspec_core.policy.cost_model import PRIOR
from moaspec_vllm import hooks
from moaspec_vllm.custom_proposer import CustomProposer
from moaspec_vllm.load_aware import HORIZON, Candidate, LoadAwareDrafts, Plan, StepCosts
from moaspec_vllm.paged_drafter.caches import PagedLayer
from moaspec_vllm.paged_drafter.vllm_drafting import DrafterParts, PagedDrafter
from moaspec_vllm.paged_drafter.vllm_target_layers import DraftHead, embedding_of
from moaspec_vllm.refusals import check_drafter
from moaspec_vllm.vllm_costs import measure
from moaspec_vllm.vllm_settings import drafter_name

logger = init_logger(__name__)

FAILURES = Counter(
    "moaspec:drafter_failures",
    "Steps of vLLM in which the drafter failed; their requests went on without drafts.",
)
SECONDS = Counter(
    "moaspec:drafter_seconds",
    "Host seconds that the drafter took, by part: encode (once per token at most) and draft.",
    ["part"],
)
SECONDS_OF = {part: SECONDS.labels(part) for part in ("encode", "draft")}


class VLLMMoAProposer(CustomProposer):
    """Drafts chains with a Mixture-of-Attentions drafter inside vLLM.

    vLLM constructs it, passes it the target (`load_model`) and calls `propose` after every step.
    `MoAWorker` starts it and tells it of each pass.

    Raises:
        ServingError: this vLLM version or one of its settings is not supported.
        UnsupportedTargetError: the target is of no supported family.
    """

    runner_hooks = hooks.RUNNER_HOOKS

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._depths = _depths(vllm_config)
        self._chooser: LoadAwareDrafts | None = None
        self._drafted: dict[str, int] = {}  # lengths of the drafts that the next step verifies
        self._begun_s = self._ended_s = time.perf_counter()
        self._decoded = False  # whether the latest step read no prompt
        self._name = drafter_name(vllm_config.additional_config)
        self._parts: DrafterParts | None = None
        self._drafter: PagedDrafter | None = None
        self._vllm_sample: Callable[[Tensor, Any], Any] | None = None
        self._greedy_only = False  # whether vLLM verifies drafts of greedy requests only

    def load_model(self, target: Any) -> None:
        """Load the drafter, connect it to the target and request its caches from vLLM.

        Raises:
            CheckpointError: the drafter is damaged, is for another target or needs N > 0.
            ServingError: the target's keys and values cannot be read in this vLLM.
        """
        for name in hooks.TARGET_HOOKS:
            hooks.require(target, name)
        layers = self.target_layers()
        device, dtype = next(target.parameters()).device, self.vllm_config.model_config.dtype
        drafter = self._load_drafter().to(device, dtype).requires_grad_(False)
        config, index = drafter.config, len(layers)
        own = range(index, index + config.self_attention_layers)
        self._parts = DrafterParts(
            drafter=packed_copy(drafter, exact=[drafter.encoder]),
            embed=embedding_of(target, target.embed_input_ids, VocabParallelEmbedding),
            head=DraftHead(target, drafter.draft_token_ids, tensor_model_parallel_all_reduce),
            text_layers=[self._paged(i, config.self_attention, "self_attn") for i in own],
            cross_attention=self._paged(own.stop, config.cross_attention, "cross_attn"),
            target_layers=layers,
            share=self.share,
        )

    def start(self, runner: Any) -> None:
        """Connect the drafter to vLLM's caches, and work around wrong temperatures if needed.

        Raises:
            ServingError: the model runner lacks one of `runner_hooks`, or the target's keys and
                values cannot be read from its caches.
        """
        super().start(runner)
        assert self._parts is not None, "vLLM loads the model before it allocates caches"
        self._drafter = PagedDrafter(self._parts, runner)
        self._vllm_sample, runner._sample = runner._sample, self._sample
        self._greedy_only = not hooks.verifies_sampled_drafts(runner.positions.device)
        if self._greedy_only:
            logger.warning(
                "vLLM %s applies no request's temperature to drafted tokens here. Steps are "
                "drafted while all of their requests are greedy.",
                hooks.installed_version(),
            )

    def prepare(self) -> None:
        """Measure the costs of drafts, unless vLLM's option fixes their length."""
        if self._depths is not None or self._drafter is None:
            return
        scheduler = self.vllm_config.scheduler_config
        assert self._parts is not None
        sizes = {"longest": self._longest, "max_requests": int(scheduler.max_num_seqs)}
        table = measure(self.runner, self._drafter, **sizes, share=self._share)
        costs = StepCosts(table, **sizes, share=self._share)
        acceptance = self._parts.drafter.config.acceptance or PRIOR
        rates = [line[0] for line in acceptance[: self._longest]]
        rate = sum(rates) / len(rates)
        self._chooser = LoadAwareDrafts(costs, longest=self._longest, rate=rate)

    @property
    def _longest(self) -> int:
        return int(self.vllm_config.speculative_config.num_speculative_tokens)

    def _share(self, numbers: list[float]) -> list[float]:
        """Numbers of the first rank, see `Share`."""
        shared: list[float] = get_tp_group().broadcast_object(numbers, src=0)
        return shared

    def begin_step(self) -> None:
        """Note the time at which the target's pass begins."""
        self._begun_s = time.perf_counter()

    def note_pass(self) -> None:
        """Note which blocks of the cache the target has begun to fill."""
        if self._drafter is not None:
            with self._failures_logged():
                self._drafter.note_pass()

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, *_: Any, **__: Any
    ) -> list[list[int]]:
        """Draft for requests of the batch, in order; an unfinished prompt gets no draft.

        Args:
            sampled_token_ids: tokens that the step verified and sampled, per request.
            num_tokens_no_spec: number of tokens of each request, including the sampled ones.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._drafter is not None:
            with self._failures_logged():
                self._count_step(sampled_token_ids)
                self._drafted.clear()
                lengths_R = num_tokens_no_spec[: len(drafts)].tolist()
                newest = {
                    row: lengths_R[row] - 1 for row, new in enumerate(sampled_token_ids) if new
                }
                plan = self._plan(newest)
                for row, chain in self._chains(plan, newest, sampled_token_ids).items():
                    drafts[row] = chain
        self._ended_s = time.perf_counter()
        return drafts

    def _count_step(self, sampled_token_ids: list[list[int]]) -> None:
        """Let the chooser learn from the step's time and from the drafts that were accepted."""
        if self._chooser is None:
            return
        batch = self.runner.input_batch
        names = batch.req_ids[: len(sampled_token_ids)]
        drafted = [self._drafted.get(name, 0) for name in names]
        for name, number, new in zip(names, drafted, sampled_token_ids, strict=True):
            if number and new:
                self._chooser.count(name, number, len(new) - 1)
        num_tokens = int(self.runner.query_start_loc.np[batch.num_reqs])
        decodes = num_tokens == len(names) + sum(drafted) and all(sampled_token_ids)
        # The first step after prompts were read takes longer.
        if decodes and self._decoded:
            now_s = time.perf_counter()
            rest_s = self._begun_s - self._ended_s
            self._chooser.costs.count_pass(len(names), sum(drafted), now_s - self._begun_s, rest_s)
        self._decoded = decodes

    def _plan(self, newest: dict[int, int]) -> Plan:
        """Choose the drafts of this step; `newest`: position of each request's newest token."""
        assert self._drafter is not None
        batch = self.runner.input_batch
        if self._greedy_only and not batch.all_greedy:
            return Plan()
        if self._chooser is not None and self._chooser.rests(batch.num_reqs):
            return Plan()
        room_R = self._drafter.room(batch.num_reqs)
        depth = self._longest if self._depths is None else self._depths[batch.num_reqs]
        rows = [row for row, last in newest.items() if depth <= room_R[row] - last]
        if self._chooser is None:
            return Plan(rows if depth else (), depth)
        names = batch.req_ids
        self._chooser.forget(set(names))
        candidates = [Candidate(row, names[row], self._left(names[row])) for row in rows]
        drafter = self._drafter
        return self._chooser.choose(
            candidates, batch.num_reqs, lambda one: drafter.backlog(one.row, newest[one.row])
        )

    def _left(self, name: str) -> int:
        """Number of tokens until the request's limit."""
        request = self.runner.requests[name]
        limit = getattr(request.sampling_params, "max_tokens", None)
        return HORIZON if limit is None else limit - len(request.output_token_ids)

    def _chains(
        self, plan: Plan, newest: dict[int, int], sampled_token_ids: list[list[int]]
    ) -> dict[int, list[int]]:
        """Encode and draft by a plan; the drafts by batch index."""
        assert self._drafter is not None
        rows, depth = plan.rows, plan.depth
        if not rows:
            return {}
        positions = [newest[row] for row in rows]
        tokens = [sampled_token_ids[row][-1] for row in rows]
        started = time.perf_counter()
        num_encoded = self._drafter.encode(rows, positions)
        encoded = time.perf_counter()
        chains = self._drafter.draft(rows, tokens, positions, depth)
        drafted = time.perf_counter()
        SECONDS_OF["encode"].inc(encoded - started)
        SECONDS_OF["draft"].inc(drafted - encoded)
        if self._chooser is not None:
            self._chooser.costs.count_encode(num_encoded, encoded - started)
            self._chooser.costs.count_draft(depth, len(rows), drafted - encoded)
        names = self.runner.input_batch.req_ids
        self._drafted = {names[row]: depth for row in rows}
        return dict(zip(rows, chains, strict=True))

    def _sample(self, logits_NV: Tensor, metadata: Any) -> Any:
        """Sample as vLLM does, without its rejection sampler in a step that verifies no drafts.

        A step with a sampled request can have drafts that must not be verified: of greedy requests
        that it joined, and drafts that vLLM adds itself after a prefix cache hit or near a text's
        limit.

        Args:
            logits_NV: logits of each request's newest token, then of its drafts.
            metadata: vLLM's metadata of the drafts; None if there are none.
        """
        assert self._vllm_sample is not None
        if metadata is None or not any(metadata.num_draft_tokens):
            metadata = None
        elif self._greedy_only and not self.runner.input_batch.all_greedy:
            newest_R = np.cumsum([0, *metadata.num_draft_tokens[:-1]])
            newest_R += np.arange(len(newest_R))
            logits_NV, metadata = logits_NV[torch.from_numpy(newest_R)], None
        return self._vllm_sample(logits_NV, metadata)

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


def _depths(vllm_config: Any) -> list[int] | None:
    """Draft length by the number of requests in a step; None: the load decides."""
    settings, most = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
    schedule = settings.num_speculative_tokens_per_batch_size
    if schedule is None:
        return None
    lookup: list[int] = build_dynamic_sd_schedule_lookup(
        schedule, most, int(settings.num_speculative_tokens)
    )
    return lookup


MoAProposer = VLLMMoAProposer
"""The class's former name, kept for vLLM options that were written by hand."""
