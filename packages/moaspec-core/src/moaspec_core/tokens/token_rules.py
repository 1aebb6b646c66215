"""Rules about tokens by position; PyTorch and transformers are imported when a rule applies."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import LogitsProcessorList


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Constraints on tokens by their position, with the names and meaning of `GenerationConfig`.

    Attributes:
        stop_token_ids, max_new_tokens: the text's own limits, which some rules need; None until
            `bound` fills them in.
    """

    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None

    def __bool__(self) -> bool:
        return self._any

    @cached_property
    def _any(self) -> bool:
        return replace(self, stop_token_ids=None, max_new_tokens=None) != TokenRules()

    @property
    def token_ids(self) -> set[int]:
        """All token ids in the rules."""
        words = (token for word in self.bad_words_ids for token in word)
        bos = () if self.forced_bos_token_id is None else (self.forced_bos_token_id,)
        lists = (self.forced_eos_token_id, self.suppress_tokens, self.begin_suppress_tokens)
        return {*words, *bos, *(token for tokens in lists for token in tokens)}

    def bound(self, stop_token_ids: Collection[int], max_new_tokens: int) -> TokenRules:
        """The rules for a text with these limits; limits that are already set stay."""
        if not self:
            return self
        stops, limit = self.stop_token_ids, self.max_new_tokens
        return replace(
            self,
            stop_token_ids=tuple(sorted(stop_token_ids)) if stops is None else stops,
            max_new_tokens=max_new_tokens if limit is None else limit,
        )

    def apply(self, token_ids: Iterable[int], prompt_length: int, logits_V: Tensor) -> Tensor:
        """Process the logits of the token after `token_ids`."""
        import torch

        key = (prompt_length, logits_V.device)
        if key not in self._processors:
            self._processors[key] = self._make_processors(prompt_length, logits_V.device)
        ids_1T = torch.tensor([list(token_ids)], device=logits_V.device)
        scores_1V: Tensor = self._processors[key](ids_1T, logits_V[None])
        return scores_1V[0]

    @cached_property
    def _processors(self) -> dict[tuple[int, torch.device], LogitsProcessorList]:
        return {}

    def _make_processors(self, prompt_length: int, device: torch.device) -> LogitsProcessorList:
        """Transformers' processors, in its order."""
        from transformers import generation

        where = str(device)
        found: list[Any] = [*self._repetition(), *self._length(prompt_length, where)]
        if self.suppress_tokens:
            found.append(
                generation.SuppressTokensLogitsProcessor(list(self.suppress_tokens), where)
            )
        if self.begin_suppress_tokens:
            # A forced first token is not counted, as in transformers.
            begin = prompt_length + (prompt_length == 1 and self.forced_bos_token_id is not None)
            tokens = list(self.begin_suppress_tokens)
            found.append(generation.SuppressTokensAtBeginLogitsProcessor(tokens, begin, where))
        return generation.LogitsProcessorList(found)

    def _repetition(self) -> Iterable[Any]:
        from transformers import generation

        if self.no_repeat_ngram_size:
            yield generation.NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size)
        stops = {(token,) for token in self.stop_token_ids or ()}
        words = [list(word) for word in self.bad_words_ids if word not in stops]
        if words:
            yield generation.NoBadWordsLogitsProcessor(words)

    def _length(self, prompt_length: int, device: str) -> Iterable[Any]:
        from transformers import generation

        stops = list(self.stop_token_ids or ())
        if self.min_length and stops:
            yield generation.MinLengthLogitsProcessor(self.min_length, stops, device)
        if self.min_new_tokens and stops:
            least = self.min_new_tokens
            yield generation.MinNewTokensLengthLogitsProcessor(prompt_length, least, stops, device)
        if self.forced_bos_token_id is not None:
            yield generation.ForcedBOSTokenLogitsProcessor(self.forced_bos_token_id)
        if self.forced_eos_token_id and self.max_new_tokens is not None:
            longest = prompt_length + self.max_new_tokens
            yield generation.ForcedEOSTokenLogitsProcessor(
                longest, list(self.forced_eos_token_id), device
            )
        if self.remove_invalid_values:
            yield generation.InfNanRemoveLogitsProcessor()
        if self.exponential_decay_length_penalty and stops:
            decay = self.exponential_decay_length_penalty
            yield generation.ExponentialDecayLengthPenalty(decay, stops, prompt_length)


NO_RULES = TokenRules()
