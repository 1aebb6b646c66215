"""vLLM as the verifier of drafts that come from elsewhere.

Each row is a request of vLLM's that waits (`MoAScheduler.wanted`) until its device has sent drafts,
so that a slow device holds nobody up; those that have share vLLM's next step. What a row brings is
decided by `SeededSampling`. A row whose text goes on otherwise than vLLM has it is submitted anew,
and finds its blocks by their prefix.

Legend: N tokens, L target layers, K one layer's key and value.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from moaspec.drafting.draft_tree import DraftTree
from moaspec.drafting.protocols import VerifyRequest, VerifyResult
from moaspec.engine.accept import Acceptance
from moaspec.errors import MoaSpecError, ServingError
from moaspec.remote.server.capabilities import EngineCapabilities
from moaspec.remote.server.service import ServingEngine
from moaspec.vllm_plugin import hooks
from moaspec.vllm_plugin.vllm_sampling import DraftedRequest, SeededSampling
from moaspec.vllm_plugin.vllm_settings import BLOCK_TOKENS, Verifying

IDLE_STEPS = 100
"""Steps in a row that do nothing for what was asked, before that is called an error."""


@dataclass
class _WaitingRow:
    """One row as vLLM has it.

    Attributes:
        text: all of its tokens; the last one may have no keys and values yet.
        salt: keeps its blocks apart from those of other texts, of this row and of others: what is
            found by its prefix is not computed, so there are no features of it. None: of all.
        request_id: the request that waits with this text; None: there is none.
    """

    text: list[int] = field(default_factory=list)
    salt: str | None = None
    request_id: str | None = None


class VLLMVerifier:
    """Verifies chains inside vLLM, in this process.

    Features are made of keys and values since a row's `base`: a row wants them in all of its
    requests or in none.

    Args:
        options: which model, how many rows, how long.
        encoder: a drafter's; None: no features.

    Raises:
        ServingError: this vLLM cannot be joined.
    """

    def __init__(self, options: Verifying, encoder: Any = None) -> None:
        hooks.require_version()
        self._options, self._encoder = options, encoder
        self._engine = _started(options)
        name = type(self._engine).__name__
        self._scheduler = hooks.require(
            self._engine, "engine_core.engine_core.scheduler", owner_name=name
        )
        executor = hooks.require(
            self._engine, "engine_core.engine_core.model_executor", owner_name=name
        )
        self._deciding: SeededSampling = hooks.require(
            executor,
            "driver_worker.worker.model_runner.drafter",
            owner_name=type(executor).__name__,
        )
        self._scheduler.wanted = set()
        self._require_room()
        self._rows: dict[int, _WaitingRow] = {}
        self._closed: deque[int] = deque()
        self._numbers = count()

    @property
    def _cache_tokens(self) -> int:
        """Tokens that vLLM has room for."""
        return int(self._scheduler.cache_config.num_gpu_blocks) * BLOCK_TOKENS

    def _require_room(self) -> None:
        """Refuse a cache in which rows would drive one another out.

        Raises:
            ServingError: says how much is missing.
        """
        got, needed = self._cache_tokens, self._options.cache_tokens
        if got < needed:
            raise ServingError(
                f"vLLM has room for {got} tokens, and {self._options.max_rows} texts of "
                f"{self._options.max_tokens} need {needed}. Ask for fewer or shorter ones."
            )

    @property
    def cache_bytes(self) -> int:
        """Keys and values held."""
        held = self._scheduler.kv_cache_manager.usage * self._cache_tokens
        return round(held) * self._options.token_bytes

    def close(self, row: int) -> None:
        """Forget a row; its blocks are free from the next verification on."""
        self._closed.append(row)

    def release(self) -> None:
        """Forget all rows and what is kept of ended ones."""
        self._forget(list(self._rows))
        self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """End vLLM."""
        self._engine.engine_core.shutdown()

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """See `Verifier`; of a tree, the chain of its first children is verified."""
        while self._closed:
            self._forget([self._closed.popleft()])
        chains = [_first_chain(request.tree) for request in requests]
        started = time.perf_counter()
        try:
            asked = [
                self._ask(request, chain) for request, chain in zip(requests, chains, strict=True)
            ]
            self._step_until_decided(asked)
            decisions = self._taken(asked)
        except Exception:
            # Nobody knows how far vLLM has come with them: their next requests begin anew.
            for request in requests:
                self._start_over(self._rows.setdefault(request.row, _WaitingRow()))
            raise
        finally:
            self._deciding.asked.clear()
            self._scheduler.wanted.clear()
        pass_s = time.perf_counter() - started
        started = time.perf_counter()
        features = self._features(asked)
        encode_s = time.perf_counter() - started
        return [
            VerifyResult(
                tuple(chain[node] for node in decision.accepted),
                decision.next_token,
                feature,
                decision.logprobs,
                encode_s,
                decision.top_logprobs,
                pass_s=pass_s,
            )
            for decision, chain, feature in zip(decisions, chains, features, strict=True)
        ]

    def _ask(self, request: VerifyRequest, chain: Sequence[int]) -> DraftedRequest:
        """Let vLLM's next steps be for this request."""
        row = self._rows.setdefault(request.row, _WaitingRow())
        text = [*row.text[: request.num_verified], *request.new_tokens]
        goes_on = row.request_id is not None and text == row.text and not request.text_length
        nodes = chain[: self._options.max_drafted] if goes_on else []
        tokens = tuple(request.tree.tokens[node] for node in nodes)
        tree = DraftTree(tokens, tuple(range(-1, len(tokens) - 1)))
        if not goes_on:
            self._submit(row, request, text)
        name = str(row.request_id)
        self._scheduler.requests[name].spec_token_ids = list(tokens)
        self._scheduler.wanted.add(name)
        asked = self._deciding.asked[name] = DraftedRequest(replace(request, tree=tree), text)
        return asked

    def _submit(self, row: _WaitingRow, request: VerifyRequest, text: list[int]) -> None:
        """A new request of vLLM's for a row's text."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._abort(row)
        extends = text[: len(row.text)] == row.text and request.num_verified >= len(row.text) - 1
        if row.salt is None or not request.num_verified or not extends:
            row.salt = str(next(self._numbers))
        # What is chosen is `SeededSampling`'s. A stretch of a prompt ends with its own tokens.
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
        except ValueError as error:  # its own checks of prompts
            raise ServingError(f"vLLM refuses a text of {len(text)} tokens: {error}") from error
        row.text = text

    def _step_until_decided(self, asked: Sequence[DraftedRequest]) -> None:
        idle = 0
        while any(one.outcome is None for one in asked):
            before = sum(one.num_steps for one in asked)
            self._engine.step()
            for name, one in self._deciding.asked.items():
                if one.outcome is not None:
                    self._scheduler.wanted.discard(name)
            idle = idle + 1 if sum(one.num_steps for one in asked) == before else 0
            if idle > IDLE_STEPS:
                raise ServingError("vLLM makes no step for what it is asked: is its cache full?")

    def _taken(self, asked: Sequence[DraftedRequest]) -> list[Acceptance]:
        """What was decided, noted as the rows' texts."""
        decisions = []
        for one in asked:
            row, outcome = self._rows[one.request.row], one.outcome
            if not isinstance(outcome, Acceptance):
                assert outcome is not None
                raise outcome
            row.text = one.text if one.request.text_length else [*one.text, outcome.next_token]
            if row.request_id not in self._scheduler.requests:  # it has ended
                row.request_id = None
            decisions.append(outcome)
        return decisions

    def _features(self, asked: Sequence[DraftedRequest]) -> list[object]:
        """The drafter's encoding of all tokens from each row's base on."""
        features: list[object] = [None] * len(asked)
        wanting = [i for i, one in enumerate(asked) if one.request.encode]
        if self._encoder is None or not wanting:
            return features
        parts = [_fresh(asked[i]) for i in wanting]
        counts = [len(part) for part in parts]
        position_ids = [
            asked[i].request.num_verified + offset
            for i, size in zip(wanting, counts, strict=True)
            for offset in range(size)
        ]
        joined_1NLK = torch.cat(parts).flatten(2)[None]
        position_ids_1N = torch.tensor([position_ids], device=joined_1NLK.device)
        encoded = self._encoder.encode(joined_1NLK, position_ids_1N, counts)
        for i, feature in zip(wanting, encoded, strict=True):
            features[i] = feature
        return features

    def _forget(self, rows: Iterable[int]) -> None:
        for index in rows:
            row = self._rows.pop(index, None)
            if row is not None:
                self._abort(row)

    def _start_over(self, row: _WaitingRow) -> None:
        """Read a row's text from its start, whatever blocks there are."""
        self._abort(row)
        row.salt = None

    def _abort(self, row: _WaitingRow) -> None:
        if row.request_id is not None:
            self._engine.abort_request([row.request_id], internal=True)
            row.request_id = None


def _started(options: Verifying) -> Any:
    """VLLM's engine.

    Raises:
        ServingError: it does not start; says why, and what can be done.
    """
    # In this process: keys and values are read where they are written.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On CPUs it would replace what is asked for.
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


def _fresh(asked: DraftedRequest) -> Tensor:
    """Keys and values from the request's base on: (N, L, G, 2 D)."""
    assert asked.num_read is not None
    assert asked.num_read <= asked.request.num_verified, (
        "blocks of tokens without features were found"
    )
    return torch.cat(asked.read)[asked.request.num_verified - asked.num_read :]


def _first_chain(tree: DraftTree) -> list[int]:
    """The nodes from the root along each first child."""
    chain: list[int] = []
    for node, parent in enumerate(tree.parents):
        if parent == (chain[-1] if chain else -1):
            chain.append(node)
    return chain


def vllm_engine(options: Verifying, encoder: Any = None) -> ServingEngine:
    """VLLM as the engine of a `TargetService`.

    Args:
        options: which model, how many rows, how long.
        encoder: of the service's drafter, see `remote.server.service.wire_encoder`; or None.

    Raises:
        ServingError: this vLLM cannot be joined.
    """
    capabilities = EngineCapabilities(
        name="vllm", max_drafted=options.max_drafted, chains_only=True
    )
    return ServingEngine(verifier=VLLMVerifier(options, encoder), capabilities=capabilities)
