"""vLLM as the verifier of drafts that devices send.

Each row is a vLLM request that waits (`MoAScheduler.wanted`) until its device has sent drafts, so a
slow device does not delay the others. Requests with drafts share vLLM's next step, and
`SeededSampler` accepts tokens. If a row's text continues differently from vLLM's copy, it is
submitted as a new request, which reuses cached blocks by prefix.

Legend: N tokens, L target layers, K one layer's key and value.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch

from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import Verifier, VerifyRequest, VerifyResult
from moaspec_core.errors import MoaSpecError, ServingError
from moaspec_core.sampling.grammar import GrammarProcessor
from moaspec_edge.protocol.wire import chain as chain_of
from moaspec_edge.server.capabilities import EngineCapabilities
from moaspec_vllm import hooks
from moaspec_vllm.vllm_sampling import PendingVerification
from moaspec_vllm.vllm_settings import BLOCK_TOKENS, VLLMVerifierSettings

MAX_IDLE_STEPS = 100
"""Consecutive steps without progress for the pending requests that raise an error."""


@dataclass
class _RequestRow:
    """One row's state inside vLLM."""

    # All tokens; the last one may have no keys and values yet.
    text: list[int] = field(default_factory=list)
    salt: str = ""  # separates its blocks in the prefix cache from those of other sessions
    request_id: str | None = None  # the waiting request with this text; None if there is none


class VLLMVerifier(Verifier):
    """Verifies chains inside vLLM, in this process or with ranks in processes of their own.

    Features are encoded from the keys and values after a request's `num_verified` tokens.

    Args:
        options: model, number of rows and lengths.
        encoder: of a drafter, see `remote.server.service.wire_encoder`; None returns no features.
        on_failure: called in another thread when a rank has died; no pass can succeed after that.

    Raises:
        ServingError: this vLLM is not supported or does not start.
    """

    def __init__(
        self,
        options: VLLMVerifierSettings,
        encoder: Any = None,
        *,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        hooks.require_version()
        self.capabilities = EngineCapabilities(
            name="vllm",
            max_drafted=options.max_drafted,
            chains_only=True,
        )
        self._options, self._encoder = options, encoder
        self._engine = _start(options)
        self._scheduler = hooks.require(self._engine, "engine_core.engine_core.scheduler")
        executor = hooks.require(self._engine, "engine_core.engine_core.model_executor")
        self._call_workers = hooks.require(executor, "collective_rpc")
        self._scheduler.wanted = set()
        self._require_room()
        hooks.require(executor, "register_failure_callback")(on_failure)
        self._rows: dict[int, _RequestRow] = {}
        self._closed: deque[int] = deque()
        self._numbers = count()

    @property
    def _cache_tokens(self) -> int:
        return int(self._scheduler.cache_config.num_gpu_blocks) * BLOCK_TOKENS

    def _require_room(self) -> None:
        """ServingError for a cache that is too small for all rows at once."""
        got, needed = self._cache_tokens, self._options.cache_tokens
        if got < needed:
            raise ServingError(
                f"vLLM has room for {got} tokens, and {self._options.max_rows} texts of "
                f"{self._options.max_tokens} need {needed}. Ask for fewer or shorter ones."
            )

    @property
    def cache_bytes(self) -> int:
        num_tokens = self._scheduler.kv_cache_manager.usage * self._cache_tokens
        return round(num_tokens) * self._options.token_bytes

    def close(self, row: int) -> None:
        """Close a row. The next verification frees its blocks."""
        self._closed.append(row)

    def release(self) -> None:
        """Close all rows and reset the prefix cache."""
        self._forget(list(self._rows))
        self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """See `Verifier`. Of a tree, only the chain of first children is verified."""
        while self._closed:
            self._forget([self._closed.popleft()])
        chains = [_first_chain(request.tree) for request in requests]
        started = time.perf_counter()
        try:
            batch = [
                self._schedule(request, chain)
                for request, chain in zip(requests, chains, strict=True)
            ]
            self._ask("begin", batch)
            batch = self._step_until_done(batch)
            decisions = self._results(batch)
        except Exception:
            # The state of these requests inside vLLM is unknown, so their rows start over.
            for request in requests:
                self._abort(self._row(request))
            raise
        finally:
            self._scheduler.wanted.clear()
        pass_s = time.perf_counter() - started
        started = time.perf_counter()
        features = self._features(batch)
        encode_s = time.perf_counter() - started
        return [
            replace(
                decision,
                features=feature,
                encode_s=encode_s,
                tree=pending.request.tree,
                pass_s=pass_s,
            )
            for decision, pending, feature in zip(decisions, batch, features, strict=True)
        ]

    def _row(self, request: VerifyRequest) -> _RequestRow:
        row = self._rows.get(request.cache_row)
        if row is None:
            row = self._rows[request.cache_row] = _RequestRow(salt=str(next(self._numbers)))
        return row

    def _schedule(self, request: VerifyRequest, chain: Sequence[int]) -> PendingVerification:
        row = self._row(request)
        text = [*row.text[: request.num_verified], *request.new_tokens]
        continues = row.request_id is not None and text == row.text and not request.text_length
        nodes = chain[: self._options.max_drafted] if continues else []
        tokens = tuple(request.tree.tokens[node] for node in nodes)
        if not continues:
            self._submit(row, request, text)
        name = str(row.request_id)
        self._scheduler.requests[name].spec_token_ids = list(tokens)
        self._scheduler.wanted.add(name)
        # Ranks in other processes get a grammar's masks, because its matcher cannot be sent.
        processors = tuple(
            processor.along(text, tokens) if isinstance(processor, GrammarProcessor) else processor
            for processor in request.sampling.processors
        )
        sampling = replace(request.sampling, processors=processors)
        return PendingVerification(
            name, replace(request, tree=chain_of(tokens), sampling=sampling), text
        )

    def _submit(self, row: _RequestRow, request: VerifyRequest, text: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._abort(row)
        # `SeededSampler` chooses the tokens. A partial prompt needs no token after it.
        settings = SamplingParams(
            temperature=0.0,
            max_tokens=1 if request.text_length else self._options.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: Any = {"prompt_token_ids": text, "cache_salt": row.salt}
        try:
            row.request_id = self._engine.add_request(str(next(self._numbers)), prompt, settings)
        except ValueError as error:  # vLLM's checks of prompts
            raise ServingError(f"vLLM refuses a text of {len(text)} tokens: {error}") from error
        row.text = text

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of each rank's `SeededSampler`; the first rank's answer."""
        return self._call_workers("call_proposer", args=(name, *arguments))[0]

    def _step_until_done(self, batch: Sequence[PendingVerification]) -> list[PendingVerification]:
        """The verifications, in order, with their outcomes."""
        done: dict[str, PendingVerification] = {}
        idle = num_rows = 0
        while len(done) < len(batch):
            self._engine.step()
            before, (num_rows, ended) = num_rows, self._ask("progress")
            done |= {pending.name: pending for pending in ended}
            self._scheduler.wanted.difference_update(done)
            idle = idle + 1 if num_rows == before else 0
            if idle > MAX_IDLE_STEPS:
                raise ServingError("vLLM makes no step for what it is asked: is its cache full?")
        return [done[pending.name] for pending in batch]

    def _results(self, batch: Sequence[PendingVerification]) -> list[VerifyResult]:
        """Results of all requests; updates the rows' texts. Raises the first error."""
        decisions = []
        for pending in batch:
            row, outcome = self._rows[pending.request.cache_row], pending.outcome
            if not isinstance(outcome, VerifyResult):
                assert outcome is not None
                raise outcome
            text = pending.text
            row.text = text if pending.request.text_length else [*text, outcome.next_token]
            if row.request_id not in self._scheduler.requests:  # it has ended
                row.request_id = None
            decisions.append(outcome)
        return decisions

    def _features(self, batch: Sequence[PendingVerification]) -> list[object]:
        """The drafter's encoding of each request's tokens after its `num_verified`."""
        features: list[object] = [None] * len(batch)
        encoded_rows = [i for i, pending in enumerate(batch) if pending.request.encode]
        if self._encoder is None or not encoded_rows:
            return features
        found = [batch[i].keys_values for i in encoded_rows]
        parts = [part for part in found if part is not None]
        assert len(parts) == len(found), "a request without an outcome has raised its error"
        counts = [len(part) for part in parts]
        position_ids = [
            batch[i].request.num_verified + offset
            for i, size in zip(encoded_rows, counts, strict=True)
            for offset in range(size)
        ]
        keys_values_1NLK = torch.cat(parts)[None].to(self._encoder.device)
        position_ids_1N = torch.tensor([position_ids], device=keys_values_1NLK.device)
        encoded = self._encoder.encode(keys_values_1NLK, position_ids_1N, counts)
        for i, feature in zip(encoded_rows, encoded, strict=True):
            features[i] = feature
        return features

    def _forget(self, rows: Iterable[int]) -> None:
        for index in rows:
            row = self._rows.pop(index, None)
            if row is not None:
                self._abort(row)

    def _abort(self, row: _RequestRow) -> None:
        if row.request_id is not None:
            self._engine.abort_request([row.request_id], internal=True)
            row.request_id = None


def _start(options: VLLMVerifierSettings) -> Any:
    """Start vLLM's engine, or raise a ServingError with cause and remedy."""
    # Keys and values are read in the process that holds them.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On CPUs this variable overrides `kv_cache_memory_bytes`.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs(**options.engine_arguments))
    except MoaSpecError:
        raise
    except Exception as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise ServingError(
            f"vLLM does not start with {options.model}: {cause} (Its cache, "
            f"{options.cache_bytes / 2**30:.1f} GiB, is smaller with fewer or shorter sessions.)"
        ) from error


def _first_chain(tree: DraftTree) -> list[int]:
    """Nodes of the path from the root along each first child."""
    chain: list[int] = []
    for node, parent in enumerate(tree.parents):
        if parent == (chain[-1] if chain else -1):
            chain.append(node)
    return chain
