"""Who writes rows for `moaspec data synth | regenerate`: a target here, or a server."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from moaspec_core.cli.options import (
    MODEL,
    Adapter,
    ChatTemplateFile,
    Device,
    Dtype,
    Model,
    Quantize,
    Threads,
    Tokenizer,
    read_lines,
    sent_api_key,
)
from moaspec_core.cli.terminal.status import loading
from moaspec_core.errors import InputError
from moaspec_core.support.locks import writing
from moaspec_core.support.paths import require_writable, require_writable_file
from moaspec_train.dataset.journal import resumed
from moaspec_train.stopping import parse_duration

if TYPE_CHECKING:
    from moaspec.target.spec import TargetSpec
    from moaspec.target.target import Target
    from moaspec_train.dataset.answer_keeper import AnswerKeeper
    from moaspec_train.dataset.endpoint_client import Endpoint
    from moaspec_train.dataset.response_writer import WriterOptions

KEY = "MOASPEC_API_KEY"
BATCH = 8  # conversations decoded together here
GROUP_SIZE = 64  # conversations that are saved together
LOCAL = (
    "drafter",
    "adapter",
    "dtype",
    "quantize",
    "device",
    "threads",
)  # no effect with --endpoint


@dataclass(frozen=True)
class WritingOptions:
    """Options of the target that writes rows."""

    out: Annotated[Path, "JSONL file to write (.gz allowed)."]
    model: Model = MODEL
    drafter: Annotated[str | None, "Drafter, for speed: alias, directory or hub id."] = None
    system_prompts: Annotated[Path | None, "Text file, one system prompt per line."] = None
    batch: Annotated[
        int | None,
        f"Conversations decoded together, {BATCH} by default; or asked of each --endpoint at once, "
        "by default as many as it answers fastest.",
    ] = None
    adapter: Adapter = None
    tokenizer: Tokenizer = None
    chat_template: ChatTemplateFile = None
    dtype: Dtype = "auto"
    quantize: Quantize = None
    device: Device = "cpu"
    threads: Threads = None
    for_: Annotated[
        str | None, typer.Option("--for", help="Stop after this time, ready to continue: 8m, 1.5h.")
    ] = None

    def checked(
        self, context: typer.Context, **sampling: Any
    ) -> tuple[WriterOptions, float | None]:
        """How to write, and for how many seconds; refuses a file that cannot be written.

        Args:
            context: of the command, until whose end no other may write the file.
            **sampling: the other fields of `WriterOptions`.
        """
        from moaspec_train.dataset.response_writer import WriterOptions

        require_writable_file("--out", self.out)
        seconds = None if self.for_ is None else parse_duration(self.for_)
        batch = BATCH if self.batch is None else self.batch
        options = WriterOptions(batch_size=batch, group_size=GROUP_SIZE, **sampling)
        asked = {name: value for name, value in asdict(options).items() if value is not None}
        known = {"target": self.model, "drafter": self.drafter, **asked}
        if self.tokenizer is not None:
            known["tokenizer"] = self.tokenizer
        context.with_resource(writing(self.out))
        resumed(self.out, known, complete=False)  # refuses the file of another run
        return options, seconds

    @property
    def replaced(self) -> dict[str, str]:
        """What is read in place of the target's own tokenizer and chat template."""
        own = {"tokenizer": self.tokenizer, "chat_template": self.chat_template}
        return {name: value for name, value in own.items() if value is not None}

    def recorded(self, target: TargetSpec) -> dict[str, str]:
        """`replaced` as the file records it: the template by its text, which may change."""
        found = self.replaced
        if self.chat_template is not None:
            template = str(cast("Any", target.tokenizer).chat_template)
            found["chat_template"] = f"SHA-256 {sha256(template.encode()).hexdigest()[:16]}"
        return found

    def systems(self) -> list[str]:
        path = self.system_prompts
        return [] if path is None else read_lines("--system-prompts", path)

    def load(self, generation_config: Literal["auto"] | None = "auto") -> tuple[Target, Any]:
        with loading(self.model, self.threads, self.quantize):
            from moaspec.backends.load import load_target
            from moaspec.generation.drafters import check_any_drafter, load_any_drafter

            drafter = self.drafter and check_any_drafter(
                self.drafter, self.model, tokenizer=self.tokenizer
            )
            target = load_target(
                self.model,
                dtype=self.dtype,
                quantize=self.quantize,
                device=self.device,
                adapter=self.adapter,
                tokenizer=self.tokenizer,
                chat_template=self.chat_template,
                generation_config=generation_config,
            )
        return target, drafter and load_any_drafter(drafter, target=target)


@dataclass(frozen=True)
class KeepingOptions:
    """What training needs of the answers beside their text, if it is kept."""

    keep: Annotated[
        Path | None,
        "Store the states of each answer in this directory, for training (its setting `kept`): "
        "then the target does not read the answers again.",
    ] = None
    keep_for: Annotated[
        str | None, "With --keep: the drafter that training goes on from (`initial`)."
    ] = None
    max_length: Annotated[int, "With --keep: tokens of a training example (`max_length`)."] = 768

    def checked(self, writing: WritingOptions, *, elsewhere: bool) -> None:
        """Refuse options that do not go together, or a place that cannot be written."""
        if (self.keep is None) != (self.keep_for is None):
            raise InputError("--keep and --keep-for go together: a directory, and a drafter.")
        if self.keep is None:
            return
        if elsewhere or writing.drafter is not None:
            other = "--endpoint" if elsewhere else "--drafter"
            raise InputError(f"--keep stores what the target computes here; leave {other} out.")
        if self.max_length < 1:
            raise InputError(f"--max-length must be at least 1, got {self.max_length}.")
        require_writable("--keep", self.keep)
        from moaspec.generation.drafters import check_drafter

        check_drafter(str(self.keep_for), writing.model)

    def load(self, target: Target) -> AnswerKeeper | None:
        """The keeper, if one is asked for."""
        if self.keep is None or self.keep_for is None:
            return None
        from moaspec.generation.drafters import load_drafter
        from moaspec_train.dataset.answer_keeper import AnswerKeeper

        drafter = load_drafter(self.keep_for, target=target)
        return AnswerKeeper(target, drafter, self.keep, max_length=self.max_length)


@dataclass(frozen=True)
class EndpointOptions:
    """The servers that write, if there are some."""

    endpoint: Annotated[
        list[str] | None,
        "URL of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, moaspec serve) that "
        "writes in place of this process; several times, or with commas, for several servers. "
        f"--model is then read for its tokenizer. ${KEY}: key.",
    ] = None
    endpoint_model: Annotated[
        str | None, "The servers' name of the model, if they have several."
    ] = None

    def checked(self, writing: WritingOptions) -> list[Endpoint]:
        """The servers; none where this process writes.

        Raises:
            InputError: no URL, a URL twice, or options that do not go together.
        """
        urls = [url.strip() for one in self.endpoint or () for url in one.split(",")]
        if not urls:
            if self.endpoint_model is not None:
                raise InputError("--endpoint-model needs --endpoint.")
            return []
        for field in fields(writing):
            if field.name in LOCAL and getattr(writing, field.name) != field.default:
                raise InputError(
                    f"--{field.name} is for decoding here, --endpoint decodes elsewhere."
                )
        twice = next((url for number, url in enumerate(urls) if url in urls[:number]), None)
        if twice is not None:
            raise InputError(f"--endpoint has {twice} twice: name each server once.")
        from moaspec_core.process_memory import allow_open_files
        from moaspec_train.dataset.endpoint_client import Endpoint

        allow_open_files()
        key, batch = sent_api_key(), writing.batch
        return [Endpoint(url=u, model=self.endpoint_model, key=key, at_once=batch) for u in urls]


def read_spec(model: str, **how: Any) -> TargetSpec:
    """A target's config and tokenizer; `how` as for `read_skeleton`."""
    with loading(model):
        from moaspec.target.registry import read_skeleton

        return read_skeleton(model, dtype="float32", **how)
