"""The report of a check of a server, as JSON and Markdown."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moaspec.evaluate.served.server_check import (
    CheckedAnswer,
    LegResult,
    ServerResult,
    request_line,
    told_of,
)

SHOWN_FAULTS = 10
HEADINGS = (
    "requests",
    "texts",
    "tokens",
    "best",
    "ties",
    "wrong",
    "not judged",
    "parted",
    "drafts",
)
RULE = (
    "Every token is compared with one pass of the reference in float32 over the server's text: "
    "it is the best there, a tie (as near to the best as the reference's rounding explains, "
    "measured on the same text) or wrong. Texts are parted where they differ from those of the "
    "first line."
)


def rows(legs: Sequence[LegResult]) -> list[tuple[str, ...]]:
    """The table's rows, below `HEADINGS`."""
    return [_row(leg) for leg in legs]


def _row(leg: LegResult) -> tuple[str, ...]:
    counts = (leg.texts, leg.tokens, leg.right, leg.ties, leg.wrong, leg.unjudged_texts, leg.parted)
    speculation = leg.speculation
    drafts = f"{speculation.accepted} of {speculation.drafted}" if speculation.drafted else "-"
    return (leg.leg.name, *map(str, counts), drafts)


def verdict_line(result: ServerResult) -> str:
    """The verdict in one sentence."""
    checked = f"{len(result.answers)} texts, {result.tokens} tokens"
    if result.verdict == "right":
        bound = result.bound()
        rate = "" if bound is None else f"; at most 1 in {1 / bound:,.0f} is wrong, at 95%"
        return f"Right ({checked}): every token is the model's choice, up to rounding{rate}."
    if result.verdict == "wrong":
        return f"Wrong ({checked}): rounding does not explain {result.wrong} tokens."
    if not result.tokens:
        reasons = dict.fromkeys(one.judged.unsure for one in result.answers if one.judged.unsure)
        return f"Not judged: {'; '.join(reasons) or 'there is no token'}."
    return f"Not judged ({checked}): the server's weights are not the reference's."


def scale_line(result: ServerResult) -> str:
    """That ties are wider, because the server rounds more than the reference's dtype."""
    return (
        f"The server rounds {result.scale:.2g} times as much as the reference's dtype, as its "
        "log-probabilities show; ties are as much wider."
    )


def as_json(result: ServerResult, about: dict[str, Any]) -> dict[str, Any]:
    """Everything, with the request of each fault."""
    numbers = result.numbers
    return {
        **about,
        "rule": RULE,
        "verdict": result.verdict,
        "right": result.verdict == "right",
        "texts": len(result.answers),
        "tokens": result.tokens,
        "wrong": result.wrong,
        "wrong_rate_bound": result.bound(),
        "numbers": numbers and {"server_nats": numbers[0], "rounding_nats": numbers[1]},
        "rounding_scale": result.scale,
        "causes": result.causes,
        "legs": [{**asdict(leg), "sign_test": leg.sign_test} for leg in result.legs],
        "faults": [_fault(one) for one in result.faults],
    }


def _fault(one: CheckedAnswer) -> dict[str, Any]:
    judged, first = one.judged, one.judged.first_wrong
    gap = judged.gaps[first] if first is not None and first < len(judged.gaps) else None
    return {
        "leg": one.leg.name,
        "prompt": one.prompt,
        "token": first,
        "gap": gap,
        "limit": judged.limit,
        "said": told_of(one),
        "token_ids": list(judged.token_ids),
        "request": {"path": one.text.path, "body": one.text.fields},
    }


BROKE_OFF = "The check broke off: the verdict is of the texts until then."


def markdown(result: ServerResult, about: dict[str, Any]) -> str:
    """A page about the check."""
    lines = [
        f"# {about['url']}",
        "",
        f"**{verdict_line(result)}**",
        *(() if about["complete"] else ("", BROKE_OFF)),
        "",
        f"Server: {about['owner'] or 'unknown'}, model {about['server_model']}. Reference: "
        f"{about['reference']} in {about['dtype']}. Seed {about['seed']}. {RULE}",
        *(() if result.scale == 1.0 else ("", scale_line(result))),
        "",
        _line(HEADINGS),
        _line(["---"] * len(HEADINGS)),
        *map(_line, rows(result.legs)),
        "",
        *(f"- {cause}" for cause in result.causes),
    ]
    if result.faults:
        lines += ["", "## Faults", ""]
    for one in result.faults[:SHOWN_FAULTS]:
        line = request_line(about["url"], one)
        lines += [f"- {told_of(one)}", "", "  ```bash", f"  {line}", "  ```"]
    if len(result.faults) > SHOWN_FAULTS:
        lines.append(f"- {len(result.faults) - SHOWN_FAULTS} more; see the JSON report.")
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
