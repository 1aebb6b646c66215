"""Configuration of a training run."""

import dataclasses
import difflib
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pydantic
import yaml
from pydantic import BeforeValidator

from moaspec.target.target import Target
from moaspec_core.checkpoint.dtypes import TargetDtype
from moaspec_core.checkpoint.user_files import open_file
from moaspec_core.errors import InputError
from moaspec_train.students.drafter_sizes import DrafterSizes
from moaspec_train.students.losses import LossWeights

_COUNTS = (
    *("batch_size", "steps", "shortest_block", "save_every", "max_length"),
    *("warm_start_tokens", "max_new_tokens", "keep_states"),
)
_AMOUNTS = (
    *("held_out", "batch_tokens", "pass_tokens", "warmup_steps", "decay_steps", "weight_decay"),
    *("average_steps", "shard_mb"),
)
_RANGES = {
    **dict.fromkeys(_COUNTS, (1, math.inf)),
    **dict.fromkeys(_AMOUNTS, (0, math.inf)),
    "clip": (1e-9, 1e9),
    "learning_rate": (1e-12, 1.0),
    "final_lr": (0.0, 1.0),
    "frozen_lsa": (0.0, 1.0),
    "longest_block": (1, 2**31 - 1),
    "seed": (0, 2**63 - 1),
}


MAX_YAML_BYTES, MAX_YAML_VALUES, MAX_NUMBER = 1 << 20, 10_000, 100
"""Of a configuration: bytes, values where aliases repeat them, and characters of a number."""
PASS_TOKENS = {"cpu": 512, "cuda": 8192}
"""Tokens of a pass, by device: on a CPU enough rows for products at full speed, on a GPU enough to
keep it busy while the next operations are launched."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run (`moaspec train CONFIG.yaml key=value ...`).

    Attributes:
        target: alias, directory, GGUF file or hub id of the frozen target.
        adapter: directory of a LoRA adapter that is merged into the target; "" for none.
        tokenizer: directory of a tokenizer that is read in place of the target's own; "" for none.
        chat_template: file with a template in Jinja, for a target that has none or a wrong one; ""
            for none.
        data: files, directories or hub data sets, in any format that `docs/data.md` lists.
        prompts: files, as `data`, of prompts that the target answers while the run goes on; only
            with `--continuous`.
        max_new_tokens: of such an answer.
        output: directory of the run: checkpoints, log, exported drafter.
        max_length: tokens of one example, prompt included.
        held_out: examples of `data` set aside for measuring.
        held_out_data: files, as `data`, whose examples are measured on instead, so that runs over
            more data are compared on the same ones. Those that are also in `data` are not trained
            on.
        batch_size: examples of one optimiser step, over all its passes and processes.
        batch_tokens: if not 0, fill a step with examples of similar length up to this number of
            tokens, pads included, instead of `batch_size` examples.
        pass_tokens: tokens of a pass, roughly; 0 means 512 on a CPU, where larger passes gain
            nothing and need more padding, and 8,192 on a GPU. It changes rounding only.
        steps: optimiser steps.
        learning_rate: peak, reached after `warmup_steps`; then a cosine decay.
        final_lr: where the decay ends, as a fraction of the peak.
        decay_steps: steps of the decay; 0 takes the rest of the run. The rate is constant
            afterwards, so the paper's recipe is a peak of 20 times the paper's rate and `final_lr`
            1/20.
        optimizer: "adamw", or "muon": Muon for matrices and AdamW for vectors, with sharding=none.
            In our runs it learned more from the same tokens.
        average_steps: held-out text is measured with, and drafters are written from, an exponential
            average of the weights that reaches back so many steps; 0 for the last weights.
        clip: largest norm of the gradients.
        shortest_block, longest_block: lengths of the blocks of the T-step bounded mask, in tokens.
        staircase: restrict SA to the query's own block: at first in all sequences, then in fewer
            and fewer, and in none from half of the run on.
        warm_start: start from the target's own weights and states, see
            `moaspec_train.students.warm_start`.
        initial: a drafter to continue from: an alias, directory or hub id. Its sizes and its N are
            kept. `warm_start` and `sizes` have no effect, except two sizes that are not 0: to
            `sizes.draft_vocab` the vocabulary grows by the most frequent other tokens of the data,
            to `sizes.sa_layers` SA grows by layers that are the identity at first.
        warm_start_tokens: number of tokens whose activations `warm_start` uses.
        frozen_lsa: fraction of the steps, at the start, with LSA's initial weights.
            Its means over layers are then computed once per example and kept on disk, which makes
            a step much cheaper; with N > 0 the target's last layers still run.
        kept: directory of these means and of final states; "" for `means` in `output`. Runs may
            share it, and `moaspec data regenerate --keep` writes to it.
        activation_cache: keep the target's activations on disk; for a baseline, its final states
            only. Without effect where `frozen_lsa` is 1, because the means are enough.
        drafter: "moa", or a baseline: "eagle" (EAGLE-2's head) or "independent" (a small language
            model between the target's embeddings and its head).
        num_target_layers: N, the number of target layers that drafts reuse. Several values train
            one drafter with an exit for each; the first one is its default.
        save_every: steps between saved states.
        keep_states: number of saved states that are kept. A run resumes from the last one; delete
            it, and the run resumes from the one before.
        shard_mb: largest file of a state or checkpoint, in MB of 10^6 bytes; 0 for no limit.
        seed: of initial weights, order and blocks.
        threads: torch threads; 0 leaves torch's default.
        device: "cpu" or "cuda"; each process takes a GPU of its own.
        target_dtype: of the target's weights, a dtype of `load_target`.
        quantize: "inputs" rounds what the weights of a GGUF target are multiplied with to 8 bits,
            see `load_target`: it writes faster, texts and states of the rounded target; only with
            `--continuous`.
        mixed_precision: "bf16" lets the drafter compute in bf16 over float32 weights.
        sharding: "fsdp" shards weights, gradients and optimiser state over the processes, "none"
            nothing (DDP).
        trackers: where to log besides `log.jsonl`: names that accelerate knows (tensorboard, ...).
        license: of the drafter, for its model card: a name that the hub knows, such as apache-2.0.
    """

    target: str
    output: str
    data: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    max_new_tokens: int = 256
    adapter: str = ""
    tokenizer: str = ""
    chat_template: str = ""
    max_length: int = 768
    held_out: int = 32
    held_out_data: tuple[str, ...] = ()
    batch_size: int = 8
    batch_tokens: int = 0
    pass_tokens: int = 0
    steps: int = 2000
    learning_rate: float = 1e-3
    final_lr: float = 0.05
    decay_steps: int = 0
    optimizer: Literal["adamw", "muon"] = "adamw"
    warmup_steps: int = 50
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    average_steps: int = 0
    clip: float = 1.0
    shortest_block: int = 5
    longest_block: int = 15
    staircase: bool = False
    warm_start: bool = True
    initial: str = ""
    warm_start_tokens: int = 12000
    frozen_lsa: float = 0.0
    kept: str = ""
    activation_cache: bool = True
    drafter: Literal["moa", "eagle", "independent"] = "moa"
    num_target_layers: tuple[int, ...] = (0,)
    save_every: int = 200
    keep_states: int = 1
    shard_mb: float = 0.0
    seed: int = 0
    threads: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    target_dtype: TargetDtype = "float32"
    quantize: Literal["", "inputs"] = ""
    # YAML reads an unquoted no as false.
    mixed_precision: Annotated[
        Literal["no", "bf16"], BeforeValidator(lambda value: "no" if value is False else value)
    ] = "no"
    sharding: Literal["none", "fsdp"] = "none"
    trackers: tuple[str, ...] = ()
    license: str = ""
    loss: LossWeights = field(default_factory=LossWeights)
    sizes: DrafterSizes = field(default_factory=DrafterSizes)

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.longest_block < self.shortest_block:
            raise InputError(
                f"longest_block ({self.longest_block}) is below shortest_block "
                f"({self.shortest_block}). Raise it, or lower the other."
            )
        layers = self.num_target_layers
        if not layers or min(layers) < 0 or len(set(layers)) < len(layers):
            raise InputError(
                f"num_target_layers must be different numbers of layers, 0 or more; got {layers}."
            )
        if self.drafter != "moa" and (max(layers) or self.frozen_lsa or self.loss.summary):
            raise InputError(
                f"drafter={self.drafter} has no LSA and reuses no layers: leave out "
                "num_target_layers, frozen_lsa and loss.summary."
            )
        moa_only = self.sizes.without or self.sizes.sa_layers or self.staircase
        if self.drafter != "moa" and moa_only:
            raise InputError(
                f"drafter={self.drafter} has neither SA, parts to leave out nor a staircase: drop "
                "sizes.sa_layers, sizes.without and staircase."
            )
        if self.sizes.publishable:
            self._check_publishable()
        if self.initial and self.drafter != "moa":
            raise InputError("initial goes on from a Mixture-of-Attentions drafter: drafter=moa.")
        self._check_frozen()
        if self.sharding not in ("none", "fsdp"):
            raise InputError(f"sharding must be none or fsdp, got {self.sharding}.")
        if self.optimizer == "muon" and self.sharding != "none":
            raise InputError("optimizer=muon works with sharding=none only.")

    def _check_frozen(self) -> None:
        if self.kept and not self.frozen_lsa:
            raise InputError("kept holds means of a frozen LSA: set frozen_lsa too, as to 1.")
        if self.frozen_lsa and self.sharding != "none":
            raise InputError("frozen_lsa works with sharding=none only.")

    def _check_publishable(self) -> None:
        several = len(self.num_target_layers) > 1
        deep = self.sizes.sa_layers > 1
        if self.drafter != "moa" or self.sizes.draft_vocab or several or deep or self.initial:
            raise InputError(
                "sizes.publishable: the published forms hold a new drafter=moa with the full "
                "vocabulary, one layer of SA and one N. Drop sizes.draft_vocab, sizes.sa_layers, "
                "further num_target_layers and initial, or sizes.publishable."
            )

    def _check_numbers(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high or value == math.inf:
                wanted = f"{low} or more" if high == math.inf else f"within {low:g}..{high:g}"
                raise InputError(f"{name} must be {wanted}, got {value}.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas must be at least 0 and below 1, got {self.betas}.")

    def require_vocabulary(self, target: Target) -> None:
        """Raise InputError where the target does not have as many tokens as drafts shall."""
        if not 0 <= self.sizes.draft_vocab <= target.vocab_size:
            raise InputError(
                f"sizes.draft_vocab={self.sizes.draft_vocab}: {target.name} has "
                f"{target.vocab_size} tokens; 0 keeps them all."
            )

    def require_enough(self, num_examples: int) -> None:
        """Raise InputError where no example is left to train on."""
        if num_examples <= self.held_out:
            raise InputError(
                f"{num_examples} examples are too few for held_out={self.held_out}, which sets "
                f"as many aside: give more data, or set held_out below {num_examples}."
            )

    def require_processes(self, processes: int) -> None:
        """Raise InputError where one process cannot train as `sharding` says."""
        if self.sharding != "none" and processes == 1:
            raise InputError(
                f"sharding={self.sharding} needs several processes: start with torchrun "
                "--nproc-per-node 2 -m moaspec train ..., or leave it out."
            )

    @property
    def shard_bytes(self) -> int:
        """Largest file of a checkpoint; 0 for no limit."""
        return int(self.shard_mb * 1e6)


def read_train_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and apply overrides.

    Args:
        overrides: `key=value`, also `key = value`, `--key value` and `--key=value`. `loss.kl=0.5`
            reaches inside.

    Raises:
        InputError: unreadable YAML, an unknown key, or a value of the wrong type.
    """
    try:
        with open_file(path) as file:
            values = _loaded(file.read(MAX_YAML_BYTES + 1).decode()) or {}
        if not isinstance(values, dict):
            raise InputError(f"The training config {path} must be a mapping of settings.")
        for key, text in _assignments(overrides):
            _override(values, key, text)
        return pydantic.TypeAdapter(TrainConfig).validate_python(_known(TrainConfig, values))
    except pydantic.ValidationError as error:
        problems = "; ".join(map(_problem, error.errors()))
        raise InputError(f"Training config {path}: {problems}.") from error
    except InputError as error:
        raise InputError(f"Training config {path}: {error}") from error
    except _YAML_ERRORS as error:
        raise InputError(
            f"Cannot read the training config {path}: {error}. moaspec train --init writes one."
        ) from error


_YAML_ERRORS = (
    *(OSError, yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, RecursionError),
)
"""What a file may raise; PyYAML passes on Python's errors of dates and numbers."""


def _loaded(text: str) -> Any:
    """A value in YAML; InputError where it is too large, also by aliases that repeat parts."""
    if len(text) > MAX_YAML_BYTES:
        raise InputError(f"it has more than {MAX_YAML_BYTES >> 20} MiB.")
    value = yaml.load(text, _UniqueKeys)  # noqa: S506 - a SafeLoader
    waiting, count = [value], 0
    while waiting:
        one, count = waiting.pop(), count + 1
        if count > MAX_YAML_VALUES:
            raise InputError(f"it has more than {MAX_YAML_VALUES} values.")
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
    return value


class _UniqueKeys(yaml.SafeLoader):
    """Refuses duplicate keys, of which PyYAML silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = next((key for key, number in keys.items() if number > 1), None)
        if twice is not None:
            raise InputError(f"the key {twice!r} occurs twice.")
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Refuse long numbers: PyYAML takes quadratic time for some."""
        is_text = node.tag == "tag:yaml.org,2002:str"
        if not is_text and len(node.value) > MAX_NUMBER:
            raise InputError(f"a number has {len(node.value)} characters, at most {MAX_NUMBER}.")
        return super().construct_scalar(node)


def _problem(error: Any) -> str:
    """Describe one of pydantic's errors by its place in the YAML file."""
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "tuple_type":
        return f"{place} must be a list, for example {place}='[a]'"
    message = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    return f"{place}: {message}" if place else message


_NESTED: dict[str, Any] = {"loss": LossWeights, "sizes": DrafterSizes}


def _known(kind: Any, values: Any, inside: str = "") -> Any:
    """Return the values as their fields take them; refuse keys that are not fields of `kind`.

    Args:
        inside: the key that holds these values, with a dot.
    """
    hints = get_type_hints(kind)
    if not isinstance(values, Mapping):
        named = f"{inside.rstrip('.')}: expected" if inside else "Expected"
        raise InputError(f"{named} a mapping of {', '.join(sorted(hints))}; got {values!r}.")
    values = {key: value for key, value in values.items() if not _is_gone(f"{inside}{key}", value)}
    unknown = next((str(key) for key in values if key not in hints), None)
    if unknown is not None:
        raise InputError(_unknown_key(inside, unknown, sorted(hints)))
    empty = {one.name for one in dataclasses.fields(kind) if one.default == ""}
    return {
        key: _known(_NESTED[key], value, f"{key}.")
        if key in _NESTED
        else ""
        if value is None and key in empty
        else _as_field(f"{inside}{key}", hints[key], value)
        for key, value in values.items()
    }


_GONE_VALUES = {
    ("sharding", "deepspeed"): "use sharding=fsdp, which shards the optimiser, too, also on CPUs",
    **{
        (
            "loss.divergence",
            gone,
        ): "use hybrid, which trains acceptance, or forward_kl"
        for gone in ("reverse_kl", "total_variation", "negative_log_acceptance")
    },
}
"""Values of earlier versions, and what to use instead."""
_GONE_KEYS: dict[str, tuple[Any, str]] = {
    "loss.survival": (0, "leave it out, and give tokens that are accepted more weight by hybrid"),
    "accumulation": (1, "pass_tokens says how many tokens a pass has, whatever their number"),
    "anchors": ("random", "blocks that begin at random places train as good a drafter"),
}
"""Settings of earlier versions: the value that did nothing, and what to use instead of others."""


def _is_gone(name: str, value: Any) -> bool:
    """Whether a setting of an earlier version says nothing; InputError where it said something."""
    advice = _GONE_VALUES.get((name, value)) if isinstance(value, str) else None
    if name in _GONE_KEYS and value != _GONE_KEYS[name][0]:
        advice = _GONE_KEYS[name][1]
    if advice is not None:
        raise InputError(f"{name}={value} is no longer supported: {advice}.")
    return name in _GONE_KEYS


def _unknown_key(inside: str, key: str, names: Sequence[str]) -> str:
    """A message with the most similar key, or with all keys of this mapping."""
    every = [
        *get_type_hints(TrainConfig),
        *(f"{name}.{hint}" for name, kind in _NESTED.items() for hint in get_type_hints(kind)),
    ]
    nearest = [one for one in every if one.rpartition(".")[2] == _plain_key(key)]
    nearest += difflib.get_close_matches(_plain_key(inside + key), every, n=1)
    nearest += ["learning_rate"] if key == "lr" else []
    advice = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(names)}."
    return f"Unknown key '{inside}{key}'; {advice}"


def _plain_key(key: str) -> str:
    return key.strip().removeprefix("--").replace("-", "_").lower()


def _as_field(name: str, hint: Any, value: Any) -> Any:
    """A value that YAML has read, as a field of this type takes it: 1e3, one item for a list."""
    if get_origin(hint) is tuple:
        if isinstance(value, str) and "," in value and not Path(value).exists():
            value = [one.strip() for one in value.split(",") if one.strip()]
        item, *others = get_args(hint)
        if isinstance(value, str | int | float) and others == [...]:
            value = [value]
        return [_as_field(name, item, one) for one in value] if isinstance(value, list) else value
    if hint in (int, float) and isinstance(value, bool):
        raise InputError(f"{name} must be a number, got {value!r}.")
    if hint in (int, float) and isinstance(value, str):
        return _number(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if hint is str and is_number else value


def _number(text: str) -> Any:
    """1e3, 5_000 and 007 as decimal numbers, which YAML reads otherwise; else the text."""
    if not re.fullmatch(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?", text.strip(), re.IGNORECASE):
        return text
    value = float(text.replace("_", ""))
    whole = text.strip().replace("_", "").lstrip("+")
    if whole.lstrip("-").isdecimal():
        return int(whole)  # exact where a float is not
    return int(value) if value.is_integer() else value


def _assignments(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Key and value of each override; parts that spaces separated are joined."""
    waiting = list(reversed(overrides))
    while waiting:
        item = waiting.pop()
        while waiting and (
            waiting[-1].startswith("=")
            or (item.endswith("=") and "=" not in waiting[-1])
            or (item.startswith("--") and "=" not in item + waiting[-1])
        ):
            rest = waiting.pop()
            item += rest if "=" in item + rest else f"={rest}"
        key, separator, text = item.partition("=")
        if item.startswith("--") and not separator:
            raise InputError(
                f"There is no option {item}: moaspec train --help lists them. Settings are written "
                "key=value."
            )
        if not separator or not key.strip():
            raise InputError(f"Expected key=value, got {item!r}.")
        is_option = key.startswith("--")
        yield (_plain_key(key) if is_option else key.strip()), text.strip()


def _override(values: dict[str, Any], key: str, text: str) -> None:
    *path, last = key.split(".")
    for name in path:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise InputError(f"{key}: {name} is a single value, nothing is inside it. Set {name}.")
    try:
        value = _loaded(text)
    except InputError as error:
        raise InputError(f"{key}: {error}") from error
    except _YAML_ERRORS as error:
        raise InputError(f"{key}: {text[:100]!r} is no value in YAML.") from error
    kind = _NESTED.get(path[0]) if path else TrainConfig
    hint = get_type_hints(kind).get(last) if kind else None
    # YAML would read a name such as 007 or no, and 1:30 or 010, as other numbers or as false.
    is_name = hint is str or hint == tuple[str, ...]
    if (is_name and isinstance(value, bool | int | float)) or hint in (int, float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        value = text if is_name or is_number else value
    values[last] = value


def launched_processes() -> int:
    """Processes that a launcher such as torchrun has started, by its environment variables.

    Raises:
        InputError: a variable that is no number, or not below the number of processes.
    """
    numbers = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
    for name, default in numbers.items():
        text = os.environ.get(name, str(default))
        if not text.isdecimal():
            raise InputError(f"${name}, which torchrun sets, must be a number; got {text!r}.")
        numbers[name] = int(text)
    if max(numbers["RANK"], numbers["LOCAL_RANK"]) >= numbers["WORLD_SIZE"]:
        said = ", ".join(f"${name}={number}" for name, number in numbers.items())
        raise InputError(f"{said}: a rank must be below the number of processes.")
    return numbers["WORLD_SIZE"]


def num_passes(config: TrainConfig, tokens: int, processes: int) -> int:
    """Passes of each process in a step of this many tokens, at least."""
    limit = config.pass_tokens or PASS_TOKENS[config.device]
    return max(1, -(-tokens // (limit * processes)))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up to the peak, then a cosine decay to `final_lr` times the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    fall = config.decay_steps or config.steps - config.warmup_steps
    done = (step - config.warmup_steps) / max(1, fall)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.learning_rate * (config.final_lr + (1 - config.final_lr) * cosine)


def staircase_probability(config: TrainConfig, step: int) -> float:
    """Probability that SA sees its own block only: 1 at first, 0 from half of the run on."""
    return max(0.0, 1 - step / (config.steps / 2)) if config.staircase else 0.0


def lsa_is_frozen(config: TrainConfig, step: int) -> bool:
    """Whether LSA keeps its initial weights at this step."""
    return config.frozen_lsa == 1.0 or step < config.frozen_lsa * config.steps
