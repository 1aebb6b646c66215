"""The extension field `moaspec` of answers. See docs/serve.md."""

from collections.abc import Sequence
from typing import Any

from moaspec_core.engine.request_state import Event
from moaspec_core.sampling.token_ids import common_length
from moaspec_serve.openai.schema import Extension
from moaspec_serve.openai.token_counts import TokenCounts
from moaspec_serve.sources.source import LinkState, SourceInfo, Update
from moaspec_serve.sources.text_writer import Piece

LINK_FIELDS = ("state", "round_trip_s", "draft_gain", "bytes_sent", "bytes_received")


class ExtensionWriter:
    """Writes the requested parts of the extension of one choice."""

    def __init__(self, index: int, requested: Extension, info: SourceInfo) -> None:
        self._index, self._requested, self._tokens = index, requested, info.token_bytes
        self._shown: tuple[int, ...] = ()  # provisional tokens that the client shows
        self._was: list[str | None] = []  # field `was` of verified tokens without a piece so far

    def chunk(
        self, update: Update, pieces: Sequence[Piece], counts: TokenCounts, link: LinkState | None
    ) -> dict[str, Any] | None:
        """The extension of a chunk; None if it is empty."""
        requested, fields = self._requested, dict[str, Any]()
        correction = self._correction(update)
        if requested.sources and pieces:
            fields["pieces"] = [self._piece(piece) for piece in pieces]
        if requested.tree and update.round is not None:
            fields["round"] = self._round(update.round, counts.rounds)
        if requested.stats:
            fields["stats"] = counts.stats()
        if requested.link and link is not None:
            fields["link"] = {name: getattr(link, name) for name in LINK_FIELDS}
        if requested.provisional and (update.provisional or self._shown):
            fields["provisional"] = [
                {"text": self._text([token]), "id": token, "source": "provisional"}
                for token in update.provisional
            ]
        if correction is not None:
            fields["correction"] = correction
        self._shown = update.provisional if requested.provisional else ()
        return {"choice": self._index, **fields} if fields else None

    def whole(self, pieces: Sequence[Piece], counts: TokenCounts) -> dict[str, Any]:
        fields: dict[str, Any] = {"choice": self._index}
        if self._requested.sources:
            fields["pieces"] = [self._piece(piece) for piece in pieces]
        if self._requested.stats:
            fields["stats"] = counts.stats()
        return fields

    def _piece(self, piece: Piece) -> dict[str, Any]:
        fields = {"text": piece.text, "id": piece.token_id, "source": piece.source}
        was = self._was.pop(0) if self._was else None
        return fields if was is None else {**fields, "was": was}

    def _round(self, done: Event, number: int) -> dict[str, Any]:
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
        return {"number": number, "nodes": nodes, "emitted": len(done.token_ids)}

    def _text(self, token_ids: Sequence[int]) -> str:
        """Text of tokens; incomplete characters become replacement characters."""
        visible = (token for token in token_ids if token not in self._tokens.special_ids)
        return b"".join(map(self._tokens, visible)).decode(errors="replace")

    def _correction(self, update: Update) -> dict[str, Any] | None:
        """Compare the verified tokens with the provisional ones; None if they agree."""
        now = (*update.token_ids, *update.provisional)
        shown = self._shown
        right = common_length(shown, now)
        for i in range(len(update.token_ids)):
            was = "provisional" if i < right else "corrected"
            self._was.append(was if i < len(shown) else None)
        if not shown or right == len(shown):
            return None
        removed = self._text(shown[right:])
        return {"confirmed": right, "removed": len(shown) - right, "text": removed}
