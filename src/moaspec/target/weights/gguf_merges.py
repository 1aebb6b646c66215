"""Merges with which BPE tokenises as llama.cpp does with the scores of SentencePiece.

llama.cpp merges the neighbouring symbols whose token has the highest score, of equal ones the
leftmost. BPE of `tokenizers` takes the merge of the lowest rank, and no two merges share a rank. So
merges of equal scores are ranked such that the leftmost is taken.

Source: `llm_tokenizer_spm` of llama.cpp.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush

from moaspec.target.weights.gguf_tokens import UnreadableError

Merge = tuple[str, str]


def merges_by_score(scores: Mapping[str, float]) -> list[Merge]:
    """The merges of a vocabulary, by rank.

    A token has at most one: the last of those that llama.cpp makes of the token's letters.

    Args:
        scores: of the tokens that a text can be merged to, and of single letters.

    Raises:
        UnreadableError: a token has a letter that is none, or ids depend on the position of tokens
            with equal scores in a text.
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
    """Merge a text's letters until this number of symbols is left, or none can be merged."""
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
        # Merges of the scores so far: by what they make, and by their symbols.
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
        """Merges of the group that must follow this one, which can be on their left in a text."""
        left, right = merge
        for other in ours.get(right, ()):
            symbols = (left, right, other[1])
            if other != merge and _merged("".join(symbols), self._scores, 3) == symbols:
                yield other
        # They do not touch, but what this one makes is merged at once with a symbol that the other
        # one needs or makes.
        made, reached = self._at_once("".join(merge))
        for symbol in {right, *made, *reached}:
            found = [*ours.get(symbol, ())] if symbol in reached else []
            for _, token in self._of_left.get(symbol, ()):
                found += self._inside(token, ours)
            yield from (other for other in found if other != merge)

    def _at_once(self, token: str) -> tuple[set[str], set[str]]:
        """What a token is merged to at once, and the symbols on its right of which it is made."""
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
    """Each merge before its `later` ones; UnreadableError where they form a circle."""
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
