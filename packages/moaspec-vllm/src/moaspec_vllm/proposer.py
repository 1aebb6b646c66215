"""The proposer that vLLM instantiates and asks for drafts after each step.

Its metrics appear under vLLM's `/metrics` if `PROMETHEUS_MULTIPROC_DIR` names an empty directory
before vLLM starts, because a vLLM worker is a separate process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from prometheus_client import Counter, Gauge
from torch import Tensor
from vllm.config import CUDAGraphMode
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
from moaspec_core.errors import ServingError
from moaspec_core.policy.cost_model import PRIOR
from moaspec_vllm import hooks
from moaspec_vllm.custom_proposer import CustomProposer
from moaspec_vllm.load_aware import DRAFTED, PLAIN, LoadAwareDrafts, StepTimes
from moaspec_vllm.paged_drafter.caches import PagedLayer
from moaspec_vllm.paged_drafter.encoded_tokens import Integers
from moaspec_vllm.paged_drafter.step_graphs import capturing
from moaspec_vllm.paged_drafter.vllm_drafting import (
    ENCODE_CHUNK,
    ENCODE_STEP,
    DrafterParts,
    PagedDrafter,
)
from moaspec_vllm.paged_drafter.vllm_target_layers import DraftHead, embedding_of
from moaspec_vllm.refusals import check_drafter
from moaspec_vllm.target_graphs import OneTokenGraphs
from moaspec_vllm.vllm_costs import measure
from moaspec_vllm.vllm_settings import UP_TO, draft_up_to, drafter_name

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


ACTIVE = Gauge(
    "moaspec:drafter_active",
    "1 while vLLM drafts with moaspec's drafter, 0 after failures that ended it.",
    multiprocess_mode="livemin",
)
MAX_FAILURES = 8  # steps in a row


@dataclass(frozen=True)
class _Step:
    """What a step did.

    Attributes:
        decodes: whether it read no prompt.
        verifies: whether it verified a draft of each request.
        drafts: whether it drafted for each request.
    """

    begun_s: float = 0.0
    num_requests: int = 0
    decodes: bool = False
    verifies: bool = False
    drafts: bool = False

    @property
    def kind(self) -> int | None:
        """`PLAIN` or `DRAFTED`, or None where it was neither entirely."""
        if not self.decodes or self.verifies != self.drafts:
            return None
        return DRAFTED if self.drafts else PLAIN


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
        self._begun_s = time.perf_counter()
        self._latest = _Step()
        self._failed = 0  # steps in a row
        self._name = drafter_name(vllm_config.additional_config)
        self._parts: DrafterParts | None = None
        self._drafter: PagedDrafter | None = None
        self._graphs: OneTokenGraphs | None = None
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

        def paged(index: int, config: LayerConfig, kind: str) -> PagedLayer:
            return PagedLayer(
                config,
                prefix=f"moa_spec.layers.{index}.{kind}.attn",
                cache_config=self.vllm_config.cache_config,
                like=layers[0],
                dtype=dtype,
                device=device,
            )

        own = range(index, index + config.self_attention_layers)
        self._parts = DrafterParts(
            drafter=packed_copy(drafter, exact=[drafter.encoder]),
            embed=embedding_of(target, target.embed_input_ids, VocabParallelEmbedding),
            head=DraftHead(target, drafter.draft_token_ids, tensor_model_parallel_all_reduce),
            text_layers=[paged(i, config.self_attention, "self_attn") for i in own],
            cross_attention=paged(own.stop, config.cross_attention, "cross_attn"),
            target_layers=layers,
            share=self.share,
        )

    def profile(self) -> None:
        """Encode made-up tokens, so that vLLM's profile of memory counts what encoding needs."""
        assert self._parts is not None
        drafter, weight = self._parts.drafter, next(self._parts.drafter.parameters())
        shape = (1, ENCODE_CHUNK, len(self._parts.target_layers), drafter.config.kv_size)
        positions_1N = torch.arange(ENCODE_CHUNK, device=weight.device)[None]
        drafter.encode(weight.new_zeros(shape), positions_1N)

    def start(self, runner: Any) -> None:
        """Connect the drafter to vLLM's caches, and work around wrong temperatures if needed.

        Raises:
            ServingError: the model runner lacks one of `runner_hooks`, or the target's keys and
                values cannot be read from its caches.
        """
        super().start(runner)
        hooks.require_arguments(runner)
        assert self._parts is not None, "vLLM loads the model before it allocates caches"
        self._drafter = PagedDrafter(self._parts, runner, max_depth=self._longest)
        self._graphs = OneTokenGraphs(runner)
        self._vllm_sample, runner._sample = runner._sample, self._sample
        self._greedy_only = not hooks.verifies_sampled_drafts(runner.positions.device)
        if self._greedy_only:
            logger.warning(
                "vLLM %s applies no request's temperature to drafted tokens here. Steps are "
                "drafted while all of their requests are greedy.",
                hooks.installed_version(),
            )
        ACTIVE.set(1)
        FAILURES.inc(0)  # exported before there is one

    def prepare(self) -> None:
        """Capture CUDA graphs, then measure the costs of drafts with them.

        Costs are not measured where vLLM's option fixes the length of drafts.
        """
        if self._drafter is None:
            return
        if self.runner.cudagraph_dispatcher.cudagraph_mode != CUDAGraphMode.NONE:
            self._capture(self._drafter)
        if self._depths is not None:
            return
        with self._failures():
            self._chooser = self._measured(self._drafter)
        if self._chooser is None:
            self._stop("their costs could not be measured")

    def _capture(self, drafter: PagedDrafter) -> None:
        """Capture CUDA graphs; where that fails, steps run without."""
        assert self._graphs is not None
        depths = {self._longest} if self._depths is None else {*self._depths} - {0}
        started, captured = time.perf_counter(), False
        try:
            with capturing(self.runner):
                self._graphs.capture()
                drafter.capture(depths)
            captured = True
        except Exception:
            torch.accelerator.synchronize()  # raises where the accelerator is lost
            logger.exception("CUDA graphs of drafts could not be captured.")
        if not self._on_all_ranks(captured):
            logger.warning("Drafts run without CUDA graphs of their own.")
            self._graphs.clear()
            drafter.drop_graphs()
            return
        took_s = time.perf_counter() - started
        logger.info("Captured %d CUDA graphs of drafts in %.0f s.", drafter.num_graphs, took_s)

    def _on_all_ranks(self, holds: bool) -> bool:
        """Whether something holds on all ranks of tensor parallelism."""
        if self._alone:
            return holds
        all_hold = torch.tensor([holds], dtype=torch.int32)
        group = get_tp_group().cpu_group
        torch.distributed.all_reduce(all_hold, torch.distributed.ReduceOp.MIN, group)
        return bool(all_hold)

    def _measured(self, drafter: PagedDrafter) -> LoadAwareDrafts:
        assert self._parts is not None
        assert self._graphs is not None
        most = int(self.vllm_config.scheduler_config.max_num_seqs)
        measured = measure(
            self.runner,
            drafter,
            self._graphs,
            length=self._longest,
            max_requests=most,
            share=self._share,
        )
        times = StepTimes(measured, max_requests=most, share=self._share)
        acceptance = self._parts.drafter.config.acceptance or PRIOR
        rates = [line[0] for line in acceptance[: self._longest]]
        return LoadAwareDrafts(times, length=self._longest, rate=sum(rates) / len(rates))

    @property
    def _longest(self) -> int:
        return int(self.vllm_config.speculative_config.num_speculative_tokens)

    @property
    def _alone(self) -> bool:
        """Whether no other rank of tensor parallelism waits for this one."""
        return int(self.vllm_config.parallel_config.tensor_parallel_size) == 1

    def _share(self, numbers: list[float]) -> list[float]:
        """Numbers of the first rank, see `Share`."""
        shared: list[float] = get_tp_group().broadcast_object(numbers, src=0)
        return shared

    def begin_step(self, num_tokens: int, num_requests: int) -> None:
        """Note the time at which the target's pass begins, and choose its CUDA graphs."""
        self._begun_s = time.perf_counter()
        if self._graphs is not None:
            self._graphs.use(one_token=num_tokens == num_requests)

    def note_pass(self) -> None:
        """Note which blocks of the cache the target has begun to fill."""
        if self._drafter is not None:
            with self._failures():
                self._drafter.note_pass()

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, *_: Any, **__: Any
    ) -> list[list[int]]:
        """Draft for all requests of the batch or for none; an unfinished prompt gets no draft.

        Args:
            sampled_token_ids: tokens that the step verified and sampled, per request.
            num_tokens_no_spec: number of tokens of each request, including the sampled ones.
        """
        number = len(sampled_token_ids)
        drafts: list[list[int]] | None = None
        if self._drafter is not None:
            new_R = np.fromiter(map(len, sampled_token_ids), np.int64, number)
            with self._failures():
                drafts = self._step(self._drafter, new_R, num_tokens_no_spec[:number])
                self._failed = 0
        return drafts or [[] for _ in range(number)]

    def _step(
        self, drafter: PagedDrafter, new_R: Integers, length_R: Integers
    ) -> list[list[int]] | None:
        """Drafts of a step, or None.

        Args:
            new_R: number of tokens that the step gave each request; 0: its prompt is unfinished.
            length_R: number of tokens of each request, these included.
        """
        number = len(new_R)
        step = self._count_step(drafter, new_R, length_R)
        depth = self._longest if self._depths is None else self._depths[number]
        rests = self._chooser is not None and self._chooser.rests(number)
        greedy = not self._greedy_only or self.runner.input_batch.all_greedy
        if not depth or rests or not greedy:
            return None
        # The newest token of a text has not been computed; an unfinished prompt has no such token.
        decodes_R = new_R > 0
        position_R = np.where(decodes_R, length_R - 1, drafter.stop_R)
        rows_R = np.argsort(~decodes_R, kind="stable")  # prompts that are still read come last
        backlog = drafter.backlog(rows_R, position_R[rows_R])
        if self._chooser is not None and not self._chooser.choose(number, len(backlog.unread)):
            return None
        # At least what the last step added, or drafts would never begin.
        now = backlog.first(max(ENCODE_STEP, number * (1 + self._longest)))
        drafted_R = np.flatnonzero(decodes_R)
        if now is not backlog and not np.isin(drafted_R, now.rows_R).all():
            drafted_R = drafted_R[:0]  # one must wait, so all do
        fits_R = drafter.fits(drafted_R, position_R[drafted_R] + depth)
        drafted_R = drafted_R[fits_R]
        started = time.perf_counter()
        sent = drafter.send(now, drafted_R, position_R[drafted_R], depth)
        drafter.encode(sent)
        encoded = time.perf_counter()
        SECONDS_OF["encode"].inc(encoded - started)
        if not len(drafted_R):
            return None
        chains = drafter.draft(sent)
        SECONDS_OF["draft"].inc(time.perf_counter() - encoded)
        self._latest = replace(step, drafts=len(drafted_R) == number)
        if len(chains) == number:
            return chains
        drafts: list[list[int]] = [[] for _ in range(number)]
        for row, chain in zip(drafted_R.tolist(), chains, strict=True):
            drafts[row] = chain
        return drafts

    def _count_step(self, drafter: PagedDrafter, new_R: Integers, length_R: Integers) -> _Step:
        """Let the chooser learn from the previous step's time and from this step's drafts."""
        # A row that reads no prompt begins at its newest token.
        decodes_R = (length_R - new_R == drafter.start_R + 1) & (new_R > 0)
        verified_R = np.where(decodes_R, drafter.stop_R - drafter.start_R - 1, 0)
        before, drafts_R = self._latest, verified_R > 0
        step = _Step(
            begun_s=self._begun_s,
            num_requests=len(new_R),
            decodes=bool(decodes_R.all()),
            verifies=bool(drafts_R.all()),
        )
        self._latest = step
        if self._chooser is not None:
            self._chooser.count(int(drafts_R.sum()), int((new_R[drafts_R] - 1).sum()))
            kind = before.kind
            if step.decodes and kind is not None and before.num_requests == step.num_requests:
                took_s = step.begun_s - before.begun_s
                self._chooser.times.count(kind, step.num_requests, took_s)
        return step

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
    def _failures(self) -> Iterator[None]:
        """Log an exception of the drafter, so that requests continue without drafts.

        After `MAX_FAILURES` in a row nothing is drafted any more. Two kinds end vLLM instead: with
        several ranks, because the others wait for this one in a collective operation, and errors of
        the accelerator, after which none of its operations succeeds.
        """
        try:
            yield
        except Exception as error:
            FAILURES.inc()
            self._failed += 1
            if not self._alone or _is_fatal(error):
                ACTIVE.set(0)
                raise
            logger.exception("The drafter failed; this step's requests go on without drafts.")
            if self._failed >= MAX_FAILURES:
                self._stop(f"the drafter failed {self._failed} times in a row")

    def _stop(self, reason: str) -> None:
        """Draft nothing from now on."""
        logger.error("No more drafts until vLLM is restarted, because %s.", reason)
        self._drafter = None
        ACTIVE.set(0)

    def facts(self) -> dict[str, Any]:
        """What became of the drafter on this rank, for `moaspec vllm-check`."""
        assert self._parts is not None
        layer = self._parts.cross_attention.attention
        by_token = layer.kv_cache.stride(1) < layer.kv_cache.stride(2)
        return {
            "drafter backend": layer.attn_backend.get_name(),
            "drafter cache": str(layer.kv_cache.dtype).removeprefix("torch."),
            "drafter cache lies": "by token" if by_token else "by head",
            "drafter graphs": 0 if self._drafter is None else self._drafter.num_graphs,
            "graphs of one token": self._graphs is not None and self._graphs.captured,
            "failures": int(FAILURES._value.get()),
            "drafts at the end": self._drafter is not None,
        }

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


def _is_fatal(error: Exception) -> bool:
    """Whether the accelerator is lost, as after an illegal access."""
    return isinstance(error, torch.AcceleratorError) and not isinstance(
        error, torch.OutOfMemoryError
    )


def _depths(vllm_config: Any) -> list[int] | None:
    """Draft length by the number of requests in a step; None: the load decides.

    VLLM's own option takes its full CUDA graphs away, so moaspec has one as well.
    """
    settings, most = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
    schedule, length = (
        settings.num_speculative_tokens_per_batch_size,
        settings.num_speculative_tokens,
    )
    drafted = draft_up_to(vllm_config.additional_config)
    if schedule is not None and drafted is not None:
        raise ServingError(
            f"Both {UP_TO} and num_speculative_tokens_per_batch_size say when to draft: leave "
            "one out."
        )
    if schedule is not None:
        lookup: list[int] = build_dynamic_sd_schedule_lookup(schedule, most, int(length))
        return lookup
    if drafted is None:
        return None
    return [length if number <= drafted else 0 for number in range(most + 1)]


MoAProposer = VLLMMoAProposer
"""The class's former name, kept for vLLM options that were written by hand."""
