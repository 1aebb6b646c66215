"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, cast

import typer

from moaspec.decode import RowOptions, parse_shape, sampling_params
from moaspec.decode.integers import as_integer
from moaspec.decode.shaping import FreeBranches as Setting

MODEL = "smollm2-135m"

Model = Annotated[str, typer.Option(help="Target: alias, directory or hub id.")]
DrafterName = Annotated[
    str | None, typer.Option(help="Alias, directory or hub id; default: the bundled one.")
]
MaxNewTokens = Annotated[int, typer.Option(help="At most so many tokens.")]
Shape = Annotated[str, typer.Option(help="auto, chain:LENGTH or tree:DEPTH,BREADTH,TOTAL_TOKENS.")]


class FreeBranchesOption(StrEnum):
    """Values of --free-branches."""

    auto = "auto"
    on = "on"
    off = "off"

    @property
    def setting(self) -> Setting:
        """The value of the Python option."""
        settings: dict[str, Setting] = {"auto": "auto", "on": True, "off": False}
        return settings[self.value]


FreeBranches = Annotated[
    FreeBranchesOption, typer.Option(help="Also try what the text itself said before.")
]
Temperature = Annotated[float, typer.Option(help="0 takes the best token.")]
TopK = Annotated[int, typer.Option(help="Sample among so many tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Sample among tokens of this mass.")]
MinP = Annotated[
    float, typer.Option(help="Drop tokens below this share of the best one's probability.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 makes tokens that occurred less likely.")
]
Seed = Annotated[int | None, typer.Option(help="Of sampling; drawn where none is given.")]
Speculation = Annotated[
    bool, typer.Option("--speculation/--no-speculation", help="Draft, or decode plainly.")
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16; auto: bfloat16 where it is faster here, else float32."
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="int8 or int4: round the target's weights by torchao. Its text is then the rounded "
        "target's, with drafts and without, and not the original's."
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]


def row_options(given: Mapping[str, Any]) -> RowOptions:
    """What a command's options mean for decoding.

    Args:
        given: all of its parameters by name; those of decoding have the names that `generate` has.

    Raises:
        ShapeError, InputError: a bad value, which should not have to wait for a model to load.
    """
    settings = {name: given[name] for name in RowOptions.__annotations__ if name in given}
    settings["free_branches"] = given["free_branches"].setting
    as_integer("--max-new-tokens", given["max_new_tokens"])
    parse_shape(given["tree"])
    sampling_params(cast(RowOptions, settings))
    return cast(RowOptions, settings)
