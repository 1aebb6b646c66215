"""The token ids of a server's answer: as sent, or from its text if that is unambiguous."""

from collections.abc import Sequence
from typing import Any, Literal

from moaspec.target.spec import TargetSpec
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.engine.request_state import GenerationResult, StopReason
from moaspec_core.errors import InputError
from moaspec_core.sampling.incremental_text import UNKNOWN
from moaspec_train.dataset.endpoint_client import Completion, UnusableAnswerError

PromptForm = Literal["ids", "text", "text without BOS"]
"""How prompts are sent: some servers take only texts, and some put a BOS token before these."""

OTHER_PROMPT = "the server read a prompt of another number of tokens, or does not count them"
OTHER_TOKENS = "the tokens of its text are not surely those that the server chose"
OTHER_TEXT = "its token ids stand for another text: is --model the server's tokenizer?"
NO_END = "it ended, and not with an end-of-turn token of the target"


class AnswerReader:
    """Sends prompts and reads answers in the target's tokens.

    Args:
        target: whose tokenizer the server's model has.

    Attributes:
        form: how prompts are sent.
    """

    def __init__(self, target: TargetSpec) -> None:
        if target.tokenizer is None:
            raise InputError(f"{target.name} has no tokenizer, which reads a server's answers.")
        self._tokenizer: Any = target.tokenizer
        self._template = ChatTemplate(target.tokenizer, target.name)
        self._stops, self._vocab_size = target.stop_token_ids, target.vocab_size
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = (token for token, one in added.items() if one.special)
        self._special = self._stops.union(self._tokenizer.all_special_ids, special)
        self._end = self._end_of_turn()
        self.form: PromptForm = "ids"

    def prompt(self, prompt_ids: Sequence[int]) -> list[int] | str:
        """A prompt as it is sent; UnusableAnswerError if no text has these ids."""
        if self.form == "ids":
            return list(prompt_ids)
        text = self._decode(prompt_ids)
        if self._template.tokenize(text) != list(prompt_ids):
            raise UnusableAnswerError("its prompt's text has other tokens than the prompt")
        bos = self._tokenizer.bos_token or ""
        return text.removeprefix(bos) if self.form == "text without BOS" else text

    def result(
        self, prompt_ids: Sequence[int], answer: Completion, *, limit: int
    ) -> GenerationResult:
        """Token ids and the reason of the end.

        Args:
            limit: number of tokens that was asked for.

        Returns:
            A stop reason of "max_new_tokens" where the server reached its limit.

        Raises:
            UnusableAnswerError: the tokens are ambiguous, or the end is not a turn's.
        """
        self.check(prompt_ids, answer)
        ids = answer.token_ids
        if ids is None:
            ids = self._read_back(prompt_ids, answer)
        return self._ended(ids, answer.choice.finish_reason, limit)

    def check(self, prompt_ids: Sequence[int], answer: Completion) -> None:
        """UnusableAnswerError for an answer to another prompt, or in another model's tokens."""
        counted = answer.counted.prompt_tokens
        unknown = counted is None and self.form == "ids"
        if not unknown and counted != len(prompt_ids):
            raise UnusableAnswerError(OTHER_PROMPT)
        ids = answer.token_ids
        if ids is not None and not self._stands_for(ids, answer.choice.text or ""):
            raise UnusableAnswerError(OTHER_TEXT)

    def _ended(self, ids: list[int], finish: str | None, limit: int) -> GenerationResult:
        """The answer up to its first end-of-turn token, which servers may have left out."""
        stop = next((i for i, token in enumerate(ids) if token in self._stops), None)
        if stop is not None:
            ids = ids[: stop + 1]
        elif finish == "stop":
            if self._end is None or (ids and ids[-1] in self._special):
                raise UnusableAnswerError(NO_END)
            ids = [*ids, self._end]
        elif finish != "length" or not ids:
            raise UnusableAnswerError(f"the server ended it for the reason {finish!r}")
        ended = ids[-1] in self._stops
        reason: StopReason = "stop_token" if ended else "max_new_tokens"
        if len(ids) > limit + ended:
            raise UnusableAnswerError(OTHER_TOKENS)
        return GenerationResult(token_ids=ids, stop_reason=reason)

    def _read_back(self, prompt_ids: Sequence[int], answer: Completion) -> list[int]:
        """The tokens of the text after a prompt, if they are unambiguous.

        Some servers count the token that ends a turn, some do not.
        """
        text, counted = answer.choice.text or "", answer.counted.completion_tokens
        uncounted = answer.choice.finish_reason == "stop"
        before = self._decode(prompt_ids)
        whole = self._template.tokenize(before + text)
        prompt, ids = whole[: len(prompt_ids)], whole[len(prompt_ids) :]
        if (
            UNKNOWN in text
            or prompt != list(prompt_ids)
            or self._decode(whole) != before + text
            or self._special.intersection(ids)
            or counted not in (None, len(ids), len(ids) + uncounted)
        ):
            raise UnusableAnswerError(OTHER_TOKENS)
        return ids

    def _stands_for(self, ids: Sequence[int], text: str) -> bool:
        """Whether ids are those of a text; servers differ in spaces and incomplete characters."""
        if any(not 0 <= token < self._vocab_size for token in ids):
            return False
        spoken = self._tokenizer.decode(
            [token for token in ids if token not in self._special], skip_special_tokens=True
        )
        own, others = ("".join(one.replace(UNKNOWN, "").split()) for one in (spoken, text))
        return own == others

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _end_of_turn(self) -> int | None:
        """The token that ends an assistant's turn in the chat template, else the only one."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            prepared = self._template.prepare(messages)
            given = self._template.text(prepared, 1, add_generation_prompt=True)
            ids = self._template.tokenize(self._template.text(prepared))
            ids = ids[len(self._template.tokenize(given)) :]
        except InputError:
            ids = []
        eos = self._tokenizer.eos_token_id
        likely = [*ids, eos, *(self._stops if len(self._stops) == 1 else ())]
        return next((token for token in likely if token in self._stops), None)
