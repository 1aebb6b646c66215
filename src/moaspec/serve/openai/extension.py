"""The field `moaspec` of answers: where tokens come from. See docs/serve.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moaspec.serve.openai.counts import TokenCounts
from moaspec.serve.openai.schema import Extension
from moaspec.serve.sources.source import LinkState, Round, SourceFacts, Update
from moaspec.serve.sources.text_writer import Piece


class Reporter:
    """Writes the extension of one text.

    Args:
        index: of the choice.
        asked: what of it is wanted.
        facts: of the target.
    """

    def __init__(self, index: int, asked: Extension, facts: SourceFacts) -> None:
        self._index, self._asked, self._tokens = index, asked, facts.token_bytes
        self._shown: tuple[int, ...] = ()  # provisional tokens that the client sees
        self._was: list[str | None] = []  # of verified tokens whose pieces are still to come

    def chunk(
        self, update: Update, pieces: Sequence[Piece], tally: TokenCounts, link: LinkState | None
    ) -> dict[str, Any] | None:
        """Of one chunk of a stream; None when nothing was asked for, or there is nothing to say."""
        asked, said = self._asked, dict[str, Any]()
        correction = self._corrected(update)
        if asked.sources and pieces:
            said["pieces"] = [self._piece(piece) for piece in pieces]
        if asked.tree and update.round is not None:
            said["round"] = self._round(update.round, tally.rounds)
        if asked.stats:
            said["stats"] = tally.stats()
        if asked.link and link is not None:
            said["link"] = link_json(link)
        if asked.provisional and (update.provisional or self._shown):
            said["provisional"] = self._provisional(update.provisional)
        if correction is not None:
            said["correction"] = correction
        self._shown = update.provisional if asked.provisional else ()
        return {"choice": self._index, **said} if said else None

    def whole(self, pieces: Sequence[Piece], tally: TokenCounts) -> dict[str, Any]:
        """Of an answer that is no stream."""
        said: dict[str, Any] = {"choice": self._index}
        if self._asked.sources:
            said["pieces"] = [self._piece(piece) for piece in pieces]
        if self._asked.stats:
            said["stats"] = tally.stats()
        return said

    def _piece(self, piece: Piece) -> dict[str, Any]:
        said = {"text": piece.text, "id": piece.token_id, "source": piece.source}
        was = self._was.pop(0) if self._was else None
        return said if was is None else {**said, "was": was}

    def _round(self, done: Round, number: int) -> dict[str, Any]:
        tree, accepted = done.tree, set(done.accepted)
        own = len(tree.tokens) - tree.num_copied
        nodes = [
            {
                "text": self._text([token]),
                "id": token,
                "parent": parent,
                "source": "draft" if node < own else "copy",
                "accepted": node in accepted,
            }
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True))
        ]
        return {"number": number, "nodes": nodes, "emitted": done.emitted}

    def _provisional(self, token_ids: Sequence[int]) -> list[dict[str, Any]]:
        return [
            {"text": self._text([token]), "id": token, "source": "provisional"}
            for token in token_ids
        ]

    def _text(self, token_ids: Sequence[int]) -> str:
        """Of tokens within a text; a part of a character shows as a replacement character."""
        spoken = (one for one in token_ids if one not in self._tokens.special_ids)
        return b"".join(map(self._tokens, spoken)).decode(errors="replace")

    def _corrected(self, update: Update) -> dict[str, Any] | None:
        """Compare what is verified now with what was shown; None where all of it was right."""
        now = (*update.token_ids, *update.provisional)
        shown = self._shown
        pairs = enumerate(zip(shown, now, strict=False))
        right = next((i for i, (a, b) in pairs if a != b), min(len(shown), len(now)))
        for i in range(len(update.token_ids)):
            was = "provisional" if i < right else "corrected"
            self._was.append(was if i < len(shown) else None)
        if not shown or right == len(shown):
            return None
        gone = self._text(shown[right:])
        return {"confirmed": right, "removed": len(shown) - right, "text": gone}


def link_json(link: LinkState) -> dict[str, Any]:
    """The extension's `link`."""
    return {
        "state": link.state,
        "round_trip_s": link.round_trip_s,
        "bytes_sent": link.bytes_sent,
        "bytes_received": link.bytes_received,
    }
