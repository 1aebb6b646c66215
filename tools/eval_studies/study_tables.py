"""Costs and cuts as tables in a terminal."""

from eval_studies.cut_quality import CutQuality
from eval_studies.pass_costs import PassCosts
from moaspec.cli.report_tables import in_ms, number
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.table import Table, show_table


def show_costs(found: PassCosts) -> None:
    """Passes by width, rounds by context and batch, and what the machine allows."""
    bound = found.bound
    show_table(widths_table(found))
    console.print_wrapped(
        f"A pass reads {bound.weight_bytes / 1e6:.0f} MB of weights, which takes at least "
        f"{in_ms(bound.floor_s)} ms at {bound.bytes_per_s / 1e9:.1f} GB/s; the arithmetic "
        f"of a token takes {in_ms(bound.arithmetic_s)} ms at "
        f"{bound.flops_per_s / 1e9:.0f} GFLOP/s. Passes over up to {bound.free_tokens} tokens cost "
        "about as much as over one."
    )
    if found.rounds:
        console.out.print()
        show_table(rounds_table(found))


def widths_table(found: PassCosts) -> Table:
    """What passes cost, and the most that drafting can bring."""
    headings = ("tokens in a pass", "ms", "speed-up if all were right")
    rows = [
        (str(width.tokens), in_ms(width.seconds), f"{found.bound.ceiling[width.tokens]:.2f}x")
        for width in found.widths
    ]
    return Table(headings, rows)


def rounds_table(found: PassCosts) -> Table:
    """What the parts of a round cost."""
    parts = (f"{part}, ms" for part in ("plain pass", "draft", "verify", "encode"))
    rows = [
        (
            one.method,
            str(one.context),
            str(one.batch),
            *map(in_ms, (one.plain_s, one.draft_s, one.verify_s, one.encode_s)),
            f"{one.break_even:.2f}",
        )
        for one in found.rounds
    ]
    return Table(("method", "context", "rows", *parts, "pays from tau"), rows)


def show_cut(cut: CutQuality) -> None:
    """What the target thinks of each continuation, and what was left out."""
    show_table(cut_table(cut))
    if cut.left_out:
        console.print_wrapped(
            f"{cut.left_out} prompts were left out: they do not fit, or their answer ended before "
            "the cut.",
            "yellow",
        )


def cut_table(cut: CutQuality) -> Table:
    """A row per continuation."""
    info = cut.as_json()["methods"]
    headings = {
        "log_likelihood": "log-probability per token",
        "agreement": "agreement",
        "same": "tokens as the target's own",
        "accuracy": "accuracy",
    }
    if all(one["accuracy"] is None for one in info.values()):
        del headings["accuracy"]
    rows = [(name, *(number(one[key]) for key in headings)) for name, one in info.items()]
    rows = [(*row, str(info[row[0]]["tokens"]), str(info[row[0]]["judged"])) for row in rows]
    first, last = f"alone after {cut.after} tokens", ("tokens", "texts")
    return Table((first, *headings.values(), *last), rows)
