"""Options that several commands have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from moaspec.cli.loading import print_defaults

if TYPE_CHECKING:
    from moaspec.drafting.policy.policies import FreeBranches as Setting
    from moaspec.generation.api import RowOptions
    from moaspec.target.target import Target

MODEL = "smollm2-135m"

Prompt = Annotated[
    str | None,
    typer.Argument(help="What the model should answer; - reads standard input, as a pipe does."),
]
System = Annotated[str | None, typer.Option(help="System prompt.")]
Model = Annotated[str, typer.Option(help="Target: alias, directory, GGUF or hub id.")]
DrafterName = Annotated[
    str | None, typer.Option(help="Alias, directory or hub id; default: the bundled one.")
]
MaxNewTokens = Annotated[int, typer.Option(help="At most so many tokens.")]
Shape = Annotated[
    str, typer.Option(help="auto, chain:LENGTH or tree:DEPTHxBREADTHxTOTAL, as in tree:6x8x62.")
]


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
Temperature = Annotated[
    float | None,
    typer.Option(help="0 takes the best token; default: the model's, where it samples, else 0."),
]
TopK = Annotated[
    int | None, typer.Option(help="Sample among so many tokens; 0: all; default: the model's.")
]
TopP = Annotated[
    float | None, typer.Option(help="Sample among tokens of this mass; default: the model's.")
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens below this share of the best one's probability; default: the model's."
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1 makes tokens that occurred less likely; default: the model's."),
]


class GenerationConfigOption(StrEnum):
    """Values of --generation-config."""

    auto = "auto"
    none = "none"

    @property
    def setting(self) -> Literal["auto"] | None:
        """The value of the Python option."""
        return None if self is GenerationConfigOption.none else "auto"


GenerationConfig = Annotated[
    GenerationConfigOption,
    typer.Option(
        help="auto: the model's generation_config.json holds where nothing else is said; none: it "
        "does not."
    ),
]
AUTO = GenerationConfigOption.auto
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


def with_model_defaults(settings: RowOptions, target: Target) -> RowOptions:
    """A command's settings for a target: without a temperature, sampled where the model samples.

    Says which of the model's defaults hold.
    """
    from moaspec.generation.api import defaults_of

    defaults = defaults_of(target, settings)
    print_defaults(target, defaults)
    if settings.get("temperature") is not None:
        return settings
    return {**settings, "temperature": defaults.temperature or 0.0}


def decoding_options(given: Mapping[str, Any]) -> RowOptions:
    """What a command's options mean for decoding.

    Args:
        given: all of its parameters by name; those of decoding have the names that `generate` has.

    Raises:
        ShapeError, InputError: a bad value, which should not have to wait for a model to load.
    """
    from moaspec.drafting.draft_tree import parse_shape
    from moaspec.sampling.stop_strings import stop_strings
    from moaspec.sampling.token_ids import as_integer

    as_integer("--max-new-tokens", given["max_new_tokens"])
    parse_shape(given["tree"])
    settings = {
        **_sampling(given),
        "max_new_tokens": given["max_new_tokens"],
        "tree": given["tree"],
        "free_branches": given["free_branches"].setting,
        "generation_config": given["generation_config"].setting,
    }
    if "stop" in given:
        settings["stop"] = stop_strings(given["stop"])
    check_sampling(settings)
    return cast("RowOptions", settings)


def check_sampling(settings: Mapping[str, Any]) -> None:
    """Raise InputError for a value that no sampling can have."""
    from moaspec.sampling.params import SamplingParams

    SamplingParams(**_sampling(settings))


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that say how tokens are chosen, where they say anything."""
    from moaspec.sampling.params import SamplingParams

    names = {field.name for field in dataclasses.fields(SamplingParams)}
    return {name: value for name, value in given.items() if name in names and value is not None}
