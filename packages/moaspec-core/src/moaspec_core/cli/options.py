"""Options that several commands have."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    cast,
    get_origin,
    get_type_hints,
)

import typer

from moaspec_core.checkpoint.dtypes import TargetDtype
from moaspec_core.checkpoint.user_files import read_limited
from moaspec_core.errors import InputError
from moaspec_core.sampling.params import SETTINGS, SamplingOptions
from moaspec_core.support.causes import system_reason

if TYPE_CHECKING:
    from moaspec_core.engine.generate_options import GenerateOptions

T = TypeVar("T")
SAMPLING = {name: setting for name, setting in SETTINGS.items() if setting.help}
"""Settings with an option, named so in `generate` and in requests too; None is not given."""
MODEL = "smollm2-135m"
NO_DRAFTER = "none"  # a value of --drafter
MAX_GIB = 1_000_000  # more memory than any machine has

Prompt = Annotated[
    str | None,
    typer.Argument(help="What the model should answer; - reads standard input, as a pipe does."),
]
System = Annotated[str | None, "System prompt."]
Model = Annotated[str, typer.Option(help="Target: alias, directory, GGUF file or hub id.")]
DrafterName = Annotated[
    str | None,
    typer.Option(
        help="Drafter: alias, directory or hub id; or a small model (alias, directory, GGUF file) "
        "that drafts; or none. Default: the bundled drafter."
    ),
]
MaxNewTokens = Annotated[int, "Maximum number of new tokens."]
Shape = Annotated[
    str, "Drafts of a round: auto, chain:LENGTH or tree:DEPTHxBREADTHxTOTAL, as in tree:6x8x62."
]
TopP = Annotated[float | None, SETTINGS["top_p"].help]
GenerationConfig = Annotated[
    Literal["auto", "none"],
    "auto: the model's generation_config.json gives the defaults; none: it is not used.",
]
Dtype = Annotated[
    Literal["auto", TargetDtype],
    typer.Option(help="auto: bfloat16 if it is faster here, else float32."),
]
Quantize = Annotated[
    Literal["int8", "int4", "inputs"] | None,
    "int8, int4: round the target's weights by torchao. inputs: of a GGUF file round what weights "
    "are multiplied with, to 8 bits. Its text is then the rounded target's, with drafts and "
    "without, and not the original's.",
]
Adapter = Annotated[
    str | None,
    "Directory of a LoRA adapter of peft, merged into the target's weights: its text is "
    "then the adapted target's.",
]
Tokenizer = Annotated[
    str | None,
    "Directory with the model's tokenizer.json, in place of the tokenizer that --model has, such "
    "as one in a GGUF file that is not known here.",
]
ChatTemplateFile = Annotated[
    str | None,
    "File with a chat template in Jinja, for a model that has none or a wrong one.",
]
Learn = Annotated[
    Path | None,
    "Let the drafter learn from the texts that are served, in a second process of lowest "
    "priority. The directory keeps its versions and no text; the newest one drafts. Default: "
    "it does not learn.",
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads at most; default: PyTorch's number.")
]
Device = Annotated[str, "A torch device."]
Link = Literal["none", "lan", "4g", "5g"]
"""Names of emulated links."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading a target and its drafter."""

    model: Model = MODEL
    drafter: DrafterName = None
    dtype: Dtype = "auto"
    quantize: Quantize = None
    adapter: Adapter = None
    tokenizer: Tokenizer = None
    chat_template: ChatTemplateFile = None
    threads: Threads = None

    @property
    def drafts(self) -> bool:
        """Whether --drafter leaves drafting to a drafter."""
        return self.drafter != NO_DRAFTER


@dataclass(frozen=True)
class DecodingOptions:
    """Options of drafting and sampling."""

    tree: Shape = "auto"
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    generation_config: GenerationConfig = "auto"

    @property
    def only_samples(self) -> bool:
        """Whether nothing but sampling differs from the defaults."""
        return replace(self, sampling={}) == DecodingOptions()

    def settings(self, max_new_tokens: int, stop: Sequence[str] = ()) -> GenerateOptions:
        """The options of `moaspec.generate`; ShapeError or InputError for a bad value."""
        from moaspec_core.drafting.tree_shapes import parse_shape
        from moaspec_core.engine.generate_options import sampling_params
        from moaspec_core.sampling.stop_strings import stop_strings
        from moaspec_core.sampling.token_ids import as_integer

        as_integer("--max-new-tokens", max_new_tokens)
        parse_shape(self.tree)
        given = {
            **self.sampling,
            "max_new_tokens": max_new_tokens,
            "tree": self.tree,
            "generation_config": generation_defaults(self.generation_config),
            "stop": stop_strings(stop),
        }
        settings = cast("GenerateOptions", given)
        sampling_params(settings)  # refuses a bad value
        return settings


def with_options(command: Callable[..., T]) -> Callable[..., T]:
    """Make a command of a function.

    A text in an `Annotated` parameter is the help of an option, which is a flag without a `--no-`
    form where False is its default. The fields of a parameter that is a dataclass are options, too,
    and so are the settings of `SAMPLING` where it is `SamplingOptions`.
    """
    signature = inspect.signature(command, eval_str=True)
    given_to = signature.parameters.values()

    @functools.wraps(command)
    def run(**given: Any) -> T:
        return command(**{one.name: _taken(one.name, one.annotation, given) for one in given_to})

    parameters = [_as_option(one) for parameter in given_to for one in _parameters(parameter)]
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run


def _parameters(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The parameters of a command in place of one of its function's."""
    group = parameter.annotation
    if group is SamplingOptions:
        made = [
            parameter.replace(name=name, default=None, annotation=_annotated(one.kind, one.help))
            for name, one in SAMPLING.items()
        ]
    elif is_dataclass(group):
        hints = get_type_hints(group, include_extras=True)
        made = [
            parameter.replace(
                name=one.name,
                default=parameter.empty if one.default is MISSING else one.default,
                annotation=hints[one.name],
            )
            for one in fields(group)
        ]
    else:
        return [parameter.replace(kind=parameter.KEYWORD_ONLY)]
    return [inner for one in made for inner in _parameters(one)]


def _annotated(kind: Any, text: str) -> Any:
    return cast(Any, Annotated)[kind | None, text]


def _taken(name: str, annotation: Any, given: dict[str, Any]) -> Any:
    """A function's argument, of the options in `given`."""
    if annotation is SamplingOptions:
        return {one: given[one] for one in SAMPLING if given[one] is not None}
    if not is_dataclass(annotation):
        return given[name]
    hints = get_type_hints(annotation, include_extras=True)
    made = {one.name: _taken(one.name, hints[one.name], given) for one in fields(annotation)}
    return cast(Any, annotation)(**made)


def _as_option(parameter: inspect.Parameter) -> inspect.Parameter:
    annotation = parameter.annotation
    if get_origin(annotation) is not Annotated or not isinstance(annotation.__metadata__[0], str):
        return parameter
    flag = (f"--{parameter.name.replace('_', '-')}",) if parameter.default is False else ()
    option = typer.Option(*flag, help=annotation.__metadata__[0])
    return parameter.replace(annotation=cast(Any, Annotated)[annotation.__origin__, option])


def generation_defaults(option: Literal["auto", "none"]) -> Literal["auto"] | None:
    """The Python value of --generation-config."""
    return "auto" if option == "auto" else None


def sent_api_key() -> str:
    """The key that requests carry, of $MOASPEC_API_KEY; InputError where no header can hold it."""
    key = os.environ.get("MOASPEC_API_KEY", "").strip()
    if not key.isascii() or not key.isprintable():
        raise InputError("$MOASPEC_API_KEY holds characters that no HTTP header can.")
    return key


MAX_FILE_BYTES = 256 << 20  # of a file that an option names


def read_file(option: str, path: Path) -> bytes:
    """The file that an option names; InputError where it cannot be read."""
    try:
        return read_limited(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{option} {path} cannot be read: {system_reason(error)}.") from error


def read_lines(option: str, path: Path) -> list[str]:
    """The lines of a text file that are not blank.

    Raises:
        InputError: it cannot be read, or has none; names the option.
    """
    try:
        text = read_file(option, path).decode("utf-8-sig")  # with a mark, as of Windows
    except UnicodeDecodeError as error:
        raise InputError(f"{option} {path} cannot be read: {error}.") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError(f"{option} {path} is empty.")
    return lines
