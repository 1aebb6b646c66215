"""Which cached keys stay valid as a text grows, and where a draft must end.

Two kinds of rotary embeddings make the key of a token depend on more than its position. With
LongRoPE all keys of a text change when the text becomes longer than a set length (a switch). With
dynamic NTK the keys depend on the length of the prompt once it exceeds the trained length. The rest
of the engine asks this module.
"""

from dataclasses import dataclass
from typing import Any, Protocol, Self


class TargetInfo(Protocol):
    """What an engine needs to know of a target; the target may run elsewhere."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def rope_switches(self) -> tuple[int, ...]: ...
    @property
    def rope_growth(self) -> int | None: ...
    @property
    def tokenizer(self) -> Any: ...


@dataclass(frozen=True)
class PositionRules:
    """Rules of one target about lengths and cached keys."""

    max_positions: int  # tokens of the longest text
    rope_switches: tuple[int, ...] = ()  # see `TargetSpec.rope_switches`
    rope_growth: int | None = None  # see `TargetSpec.rope_growth`

    @classmethod
    def of(cls, target: TargetInfo, max_positions: int | None = None) -> Self:
        """The rules of a target; `max_positions` replaces its context length."""
        return cls(
            target.max_positions if max_positions is None else max_positions,
            tuple(target.rope_switches),
            target.rope_growth,
        )

    @property
    def are_plain(self) -> bool:
        """Whether a token's key depends on its position alone: then cached keys stay valid."""
        return not self.rope_switches and self.rope_growth is None

    def key_version(self, length: int) -> int:
        """Number of switches that a text of this length has crossed.

        Keys of texts with different versions differ from the first token on.
        """
        return sum(length > switch for switch in self.rope_switches)

    def keeps_keys(self, old_length: int, new_length: int) -> bool:
        """Whether keys stay valid while a text grows from one length to another."""
        return self.key_version(old_length) == self.key_version(new_length)

    def shares_keys(
        self, old_length: int, new_length: int, old_prompt_length: int, new_prompt_length: int
    ) -> bool:
        """Whether a new text can use the cached keys of an old one with the same first tokens.

        Args:
            old_length: tokens of the old text when its keys were computed.
            new_length: tokens of the new prompt.
            old_prompt_length: how many of the old text's tokens were its prompt.
            new_prompt_length: the same for the new text.
        """
        longest = max(old_prompt_length, new_prompt_length)
        grown = self.rope_growth is not None and longest > self.rope_growth
        return not grown and self.keeps_keys(old_length, new_length)

    def rope_length(self, prompt_length: int, text_length: int) -> int:
        """The length that determines a text's rotary embeddings."""
        return text_length if self.rope_growth is None else prompt_length

    def end_of_drafts(self, length: int) -> int:
        """Length that a text of `length` tokens must not exceed by drafts.

        It is the context length or the next switch.
        """
        return min([self.max_positions, *(s for s in self.rope_switches if s >= length)])
