"""Verification with a hybrid target: some layers keep states, see `recurrent_states`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moaspec.drafting.kv_cache import KVCache, KVWriter
from moaspec.engine.local_verifier import PREFILL_CHUNK_TOKENS, LocalVerifier, PassRow
from moaspec.target.generic.hybrid_layers import HybridLayers
from moaspec.target.generic.recurrent_states import StepPass, StepRow, TextState, num_bytes
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import Proposer, VerifyRequest, VerifyResult


def local_verifier(target: Target, proposer: Proposer | None = None) -> LocalVerifier:
    """The verifier for a target in this process, see `LocalVerifier`."""
    kind = RecurrentVerifier if isinstance(target.layers, HybridLayers) else LocalVerifier
    return kind(target, proposer)


class StatefulWriter(KVWriter):
    """A `KVWriter` that is a `SteppedWrite`."""

    steps: StepPass


@dataclass(frozen=True)
class _VerifiedRow:
    """One row of a finished pass, until it is known which of its drafts are accepted."""

    steps: StepPass
    row: int  # its index in the pass
    root: int  # index of the row's root
    length: int  # tokens of the text up to the root


class RecurrentCache(KVCache):
    """Keys and values of attention layers, and the states of the others.

    Of each row it keeps the states after the last verified token.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._states: dict[int, tuple[int, TextState]] = {}
        self._verified: dict[int, _VerifiedRow] = {}
        self._steps: StepPass | None = None

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(num_bytes(state) for _, state in self._states.values())

    def length(self, row: int) -> int:
        """Number of tokens that a row's states cover; 0 if it has none."""
        verified = self._verified.get(row)
        return self._states.get(row, (0, {}))[0] if verified is None else verified.length

    def state(self, row: int) -> TextState:
        """The states of a row; empty if it has none."""
        verified = self._verified.get(row)
        if verified is not None:
            self._keep(row, 0, verified.length)
        return self._states.get(row, (0, {}))[1]

    def begin_pass(self, rows: Sequence[StepRow]) -> None:
        self._steps = StepPass(rows)

    def end_pass(self, rows: Sequence[PassRow]) -> None:
        """Take each row's states after its new tokens; `commit` adds accepted drafts."""
        steps, self._steps = self._steps, None
        assert steps is not None, "end_pass follows begin_pass"
        for i, row in enumerate(rows):
            verified = _VerifiedRow(steps, i, row.num_new - 1, row.start + row.num_new)
            self._verified[row.request.cache_row] = verified

    def commit(self, row: int, start: int, slots: Sequence[int]) -> None:
        """Keep accepted drafts, see `KVCache.commit`, and the states after the last of them."""
        super().commit(row, start, slots)
        self._keep(row, slots[-1] + 1 - start if slots else 0, start + len(slots))

    def _keep(self, row: int, offset: int, length: int) -> None:
        """Keep the states after the token at this offset from the root."""
        verified = self._verified.pop(row)
        state = verified.steps.after(verified.row, verified.root + offset)
        self._states[row] = length, state

    def give_back(self, row: int, kept: int = 0) -> None:
        """See `KVCache`; a row without keys has no states either."""
        super().give_back(row, kept)
        if not kept:
            self._states.pop(row, None)
            self._verified.pop(row, None)

    def writer(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        num_tokens: int,
        visible: int,
        kind: type[KVWriter] | None = None,
    ) -> KVWriter:
        """A writer for one pass; without `begin_pass` every row is a chain (calibration)."""
        del kind
        writer = super().writer(rows, starts, num_tokens, visible, StatefulWriter)
        assert isinstance(writer, StatefulWriter)
        read = num_tokens if max(starts) == 0 else 1
        chain = StepRow(read, range(read - 1, num_tokens - 1), {})
        writer.steps = self._steps or StepPass([chain] * len(rows))
        return writer

    def release(self) -> None:
        super().release()
        self._states.clear()
        self._verified.clear()


class RecurrentVerifier(LocalVerifier):
    """A `LocalVerifier` that keeps recurrent and convolution states.

    A request continues from its row's states if they end where it begins. Otherwise (the text
    changed, a verification was interrupted) all tokens before it are processed again.
    """

    cache: RecurrentCache

    def __init__(self, target: Target, proposer: Proposer | None = None) -> None:
        super().__init__(target, proposer)
        assert isinstance(target.layers, HybridLayers), "chosen by `local_verifier`"
        self._layers = target.layers
        if self._layers.reads_whole:
            self.prompt_tokens, self.reads_whole = sys.maxsize, True
        self.cache = RecurrentCache(target)
        self._num_read_again: dict[int, int] = {}

    def _verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """See `LocalVerifier`; also counts what was processed again."""
        self._num_read_again.clear()
        results = super()._verify(requests)
        for request, result in zip(requests, results, strict=True):
            result.num_read_again = self._num_read_again.get(request.cache_row, 0)
        return results

    def _prefill(self, requests: Sequence[VerifyRequest]) -> list[PassRow]:
        """As `LocalVerifier` does, but without chunks if a prompt must be read in one pass."""
        if self._layers.reads_whole:
            return [
                PassRow(
                    request,
                    request.num_verified,
                    request.new_tokens + request.tree.tokens,
                    len(request.new_tokens),
                )
                for request in requests
            ]
        for request in requests:
            self._restore(request)
        return super()._prefill(requests)

    def _restore(self, request: VerifyRequest) -> None:
        """Process the text before a request again, unless the row's states end there."""
        if self.cache.length(request.cache_row) == request.num_verified:
            return
        known = self._reprocessed_tokens(request.cache_row, request.num_verified)
        plain = replace(request, tree=DraftTree())
        for start in range(0, len(known), PREFILL_CHUNK_TOKENS):
            chunk = known[start : start + PREFILL_CHUNK_TOKENS]
            self._pass([PassRow(plain, start, chunk, len(chunk))])

    def _states(self, rows: Sequence[PassRow]) -> list[Tensor]:
        """Final states: one pass for all rows that only step, one for each row that reads."""
        states: dict[int, Tensor] = {}
        stepping: list[PassRow] = []
        for row in rows:
            whole = self._with_usable_states(row)
            if whole is row and self._num_read(row) == 0:
                stepping.append(row)
            else:
                states_TE = self._pass([whole])[0, : len(whole.tokens)]
                states[row.request.cache_row] = states_TE[len(whole.tokens) - len(row.tokens) :]
        if stepping:
            states_BTE = self._pass(stepping)
            for row, states_TE in zip(stepping, states_BTE, strict=True):
                states[row.request.cache_row] = states_TE[: len(row.tokens)]
        return [states[row.request.cache_row] for row in rows]

    def _with_usable_states(self, row: PassRow) -> PassRow:
        """The row; if its states cannot be used, a row from the start of its text."""
        reads_on = self._layers.reads_whole and row.start < row.request.prompt_length
        if row.start == 0 or (
            self.cache.length(row.request.cache_row) == row.start and not reads_on
        ):
            return row
        known = self._reprocessed_tokens(row.request.cache_row, row.start)
        return PassRow(row.request, 0, known + row.tokens, len(known) + row.num_new)

    def _reprocessed_tokens(self, cache_row: int, num_tokens: int) -> tuple[int, ...]:
        """The first tokens of a text, which are processed again."""
        self._num_read_again[cache_row] = num_tokens
        return tuple(self._texts[cache_row][:num_tokens])

    def _pass(self, rows: Sequence[PassRow]) -> Tensor:
        """The pass of `LocalVerifier`; the cache then has the states after the new tokens."""
        self.cache.begin_pass([self._step_row(row) for row in rows])
        states_BTE = super()._pass(rows)
        self.cache.end_pass(rows)
        return states_BTE

    def _num_read(self, row: PassRow) -> int:
        """How many of a row's tokens are read in one call: those of the prompt."""
        end = row.request.prompt_length or row.start + row.num_new * (row.num_new > 1)
        num = min(max(0, end - row.start), row.num_new)
        if row.start == 0:
            return max(1, num)
        return num if self._layers.continues else 0

    def _step_row(self, row: PassRow) -> StepRow:
        num_read, root = self._num_read(row), row.num_new - 1
        drafts = row.request.tree.parents if row.drafted else ()
        parents = [*range(num_read - 1, root), *(root + 1 + parent for parent in drafts)]
        before = self.cache.state(row.request.cache_row) if row.start else {}
        return StepRow(num_read, parents, before)
