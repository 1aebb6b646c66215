"""Turn the scores of a SentencePiece vocabulary into merges of BPE, with llama.cpp's results.

llama.cpp merges the two neighbouring symbols whose token has the highest score, and of equal scores
the leftmost. BPE of `tokenizers` applies the merge with the lowest rank first, and ranks are all
different. So merges of equal scores get ranks with which the leftmost is applied first.

Source: `llm_tokenizer_spm` of llama.cpp.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush

from moaspec.target.weights.gguf_tokens import UnreadableError

Merge = tuple[str, str]


def merges_by_score(scores: Mapping[str, float]) -> list[Merge]:
    """The merges of a vocabulary, by rank.

    A token has at most one merge: the last step in which llama.cpp merges the token's letters.

    Args:
        scores: of letters, and of the tokens to which a text can be merged.

    Raises:
        UnreadableError: a letter of a token is no token, or no ranks apply the leftmost of equal
            scores first in all texts.
    """
    groups: dict[float, list[Merge]] = defaultdict(list)
    for token, score in scores.items():
        merge = _merged(token, scores, 2)
        if len(merge) != 2:
            continue  # a letter, or not made of its letters
        left, right = merge
        if left not in scores or right not in scores:
            raise UnreadableError(f"{token!r} is a token, and not all of its letters are.")
        groups[score].append((left, right))
    found: list[Merge] = []
    ties = _Ties(scores)
    for score in sorted(groups, reverse=True):
        found += ties.ranked(groups[score])
    return found


def _merged(text: str, scores: Mapping[str, float], number: int) -> tuple[str, ...]:
    """Merge a text's letters until `number` symbols are left, or no two can be merged."""
    symbols, size = list(text), len(text)
    before, behind = list(range(-1, size - 1)), list(range(1, size + 1))
    queue: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        token = symbols[left] + symbols[right]
        if (score := scores.get(token)) is not None:
            heappush(queue, (-score, left, right, token))

    for right in range(1, size):
        offer(right - 1, right)
    remaining = size
    while queue and remaining > number:
        _, left, right, token = heappop(queue)
        if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != token:
            continue  # one of them was merged with another symbol since
        symbols[left], symbols[right] = token, ""
        remaining -= 1
        following = behind[left] = behind[right]
        if left:
            offer(before[left], left)
        if following < size:
            before[following] = left
            offer(left, following)
    return tuple(filter(None, symbols))


class _Ties:
    """Ranks merges of equal scores. Takes groups of them, the highest score first."""

    def __init__(self, scores: Mapping[str, float]) -> None:
        self._scores = scores
        # Merges of this score and of higher ones, by their result and by their symbols.
        self._of_token: dict[str, Merge] = {}
        self._of_left: dict[str, list[Merge]] = defaultdict(list)
        self._of_right: dict[str, list[Merge]] = defaultdict(list)

    def ranked(self, group: Sequence[Merge]) -> list[Merge]:
        """The merges of one score, in an order that takes the leftmost in any text.

        Raises:
            UnreadableError: there is none.
        """
        ours: dict[str, list[Merge]] = defaultdict(list)
        for merge in group:
            self._of_token["".join(merge)] = merge
            self._of_left[merge[0]].append(merge)
            self._of_right[merge[1]].append(merge)
            ours[merge[0]].append(merge)
        if len(group) == 1:
            return [*group]
        return _sorted(group, lambda merge: self._later(merge, ours))

    def _later(self, merge: Merge, ours: Mapping[str, list[Merge]]) -> Iterator[Merge]:
        """Merges of the group that need a later rank, as this one may be on their left."""
        left, right = merge
        for other in ours.get(right, ()):
            symbols = (left, right, other[1])
            if other != merge and _merged("".join(symbols), self._scores, 3) == symbols:
                yield other
        # They share no symbol, but the result of this one is merged further at once, with a symbol
        # that the other one merges or makes.
        made, reached = self._at_once("".join(merge))
        for symbol in {right, *made, *reached}:
            found = [*ours.get(symbol, ())] if symbol in reached else []
            for _, token in self._of_left.get(symbol, ()):
                found += self._inside(token, ours)
            yield from (other for other in found if other != merge)

    def _at_once(self, token: str) -> tuple[set[str], set[str]]:
        """Results of merges that follow at once, and the symbols that they take on the right."""
        made, reached, new = {token}, set[str](), [token]
        while new:
            token = new.pop()
            rightwards, leftwards = self._of_left.get(token, []), self._of_right.get(token, [])
            reached |= {right for _, right in rightwards}
            following = {"".join(merge) for merge in (*rightwards, *leftwards)}
            new += following - made
            made |= following
        return made, reached

    def _inside(self, token: str, ours: Mapping[str, list[Merge]]) -> Iterator[Merge]:
        """Merges of the group that make a part of a token."""
        parts = [token]
        while parts:
            merge = self._of_token.get(parts.pop())
            if merge is not None:
                parts += merge
                if merge in ours.get(merge[0], ()):
                    yield merge


def _sorted(merges: Iterable[Merge], later: Callable[[Merge], Iterator[Merge]]) -> list[Merge]:
    """Put each merge before its `later` ones. UnreadableError: they form a circle."""
    done: dict[Merge, bool] = {}
    found: list[Merge] = []
    for first in merges:
        path = [] if first in done else [(first, later(first))]
        done.setdefault(first, False)
        while path:
            merge, rest = path[-1]
            other = next(rest, None)
            if other is None:
                found.append(merge)
                done[merge] = True
                path.pop()
            elif other not in done:
                done[other] = False
                path.append((other, later(other)))
            elif not done[other]:
                one, two = ("".join(pair) for pair in (merge, other))
                raise UnreadableError(
                    f"Its tokens {one!r} and {two!r} have the same score, so that the one further "
                    "left in a text goes first, which no order of merges gives."
                )
    return found[::-1]
