"""Tokens of texts that begin alike, without encoding their common beginning again."""

from itertools import accumulate, pairwise

from moaspec_core.chat.chat_template import ChatTemplate


class PrefixTokens:
    """Tokens of a rendered text, and of others that begin as it does.

    A text is cut where control tokens begin, because no token of the tokenizer reaches over such a
    place. If the parts of this text give other tokens than the whole, nothing is cut.

    Attributes:
        ids: tokens of the text.

    Raises:
        InputError: see `ChatTemplate.tokenize`.
    """

    def __init__(self, template: ChatTemplate, text: str) -> None:
        self._template, self._text = template, text
        self.ids = template.tokenize(text)
        # Where parts begin, in characters and in tokens.
        self._starts, self._counts = [0], [0]
        starts = [0, *template.control_tokens.starts(text)]
        parts = [template.tokenize(text[a:b]) for a, b in pairwise([*starts, len(text)])]
        if [token for part in parts for token in part] == self.ids:
            self._starts, self._counts = starts, [0, *accumulate(map(len, parts))]

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text; only what follows the common beginning is encoded."""
        number = self._common_parts(text)
        start = self._starts[number]
        return self.ids[: self._counts[number]] + self._template.tokenize(text[start:])

    def _common_parts(self, text: str) -> int:
        """The number of parts at the start of both texts; `text` can be cut behind them."""
        low, high = 0, len(self._starts) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if text.startswith(self._text[: self._starts[middle]]):
                low = middle
            else:
                high = middle - 1
        cuts = self._template.control_tokens.cuts
        while low and not cuts(text, self._starts[low]):
            low -= 1
        return low
