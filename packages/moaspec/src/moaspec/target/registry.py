"""Names of targets, and how to find their weights."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from moaspec.hub import cached_if_offline
from moaspec.target.families import is_family, require_supported
from moaspec.target.generic.generic_target import target_of
from moaspec.target.generic.rules import require_generic_config
from moaspec.target.rope_fields import require_rope
from moaspec.target.spec import TargetSpec
from moaspec.target.target import PROCESS_SETTINGS, Target
from moaspec.target.weights.adapter import adapter_hash, merged
from moaspec.target.weights.gguf import (
    CONVERSION,
    INDEX,
    dequantised,
    described,
    find_gguf,
    is_file,
    is_gguf_name,
    key_of,
    named_errors,
    require_readable_tokenizer,
)
from moaspec.target.weights.gguf_config import architecture_of
from moaspec.target.weights.gguf_file import read_by_index
from moaspec.target.weights.gguf_tensors import sources
from moaspec.target.weights.quantised import prepare_config, widen
from moaspec.target.weights.stored import fill_from_file
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.checkpoint.directory import is_directory
from moaspec_core.checkpoint.dtypes import TARGET_DTYPES
from moaspec_core.checkpoint.speculators_fields import Verifier
from moaspec_core.checkpoint.user_files import read_limited, why_not_files
from moaspec_core.errors import HubError, InputError, MoaSpecError, UnknownModelError
from moaspec_core.sampling.generation_defaults import check_ends, check_numbers, without_defaults
from moaspec_core.support.causes import first_line
from moaspec_core.tokens.names import ALIASES, hub_id, local_gguf

TOKENIZER_JSON = "tokenizer.json"
MAX_TEMPLATE_BYTES = 1 << 20
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in TARGET_DTYPES}


def read_target(
    name: str | Path,
    *,
    dtype: str,
    device: str = "cpu",
    quantize: str | None = None,
    adapter: str | Path | None = None,
    tokenizer: str | Path | None = None,
    generation_config: Literal["auto"] | None = "auto",
    in_file_bits: bool = False,
) -> Target:
    """Load a target as transformers loads it.

    Args:
        dtype: one of `TARGET_DTYPES`.
        quantize: format to which the caller will round the weights.
        tokenizer: directory of a tokenizer in place of the target's own.
        in_file_bits: leave quantised weights of a GGUF file in the file, see `weights.stored`, for
            `accelerate`; on the CPU, without an adapter.

    Raises:
        InputError, UnknownModelError, UnsupportedTargetError: see `moaspec.load_target`.
    """
    name = str(name)
    hashed = None if adapter is None else adapter_hash(adapter)
    stays = in_file_bits and adapter is None and _is_family_gguf(name, tokenizer)
    with _named_errors(name, tokenizer, weights=not stays) as source:
        if stays:
            model = _stored_model(source, name, dtype)
        else:
            model = _load_model(source, name, dtype).to(device)
        if adapter is not None:
            model = merged(model, adapter, name)
        model.generation_config = _generation_config(source, model.config, generation_config)
        words = _tokenizer(source, tokenizer, model.config)
        target = target_of(model, words, name=name, quantize=quantize)
        target.adapter = hashed
        return target


def read_skeleton(
    name: str | Path,
    *,
    dtype: str,
    tokenizer: str | Path | None = None,
    chat_template: str | None = None,
    generation_config: Literal["auto"] | None = "auto",
) -> Target:
    """Read a target without its weights, on the meta device.

    Args:
        dtype, tokenizer: see `read_target`.
        chat_template: see `load_target`.

    Raises:
        InputError, UnknownModelError, UnsupportedTargetError: see `moaspec.load_target`.
    """
    require_dtype(dtype)
    name = str(name)
    template = None if chat_template is None else read_chat_template(Path(chat_template))
    with _named_errors(name, tokenizer, weights=False) as source:
        config = _read_config(source, name)
        model = skeleton_of(config, dtype)
        model.generation_config = _generation_config(source, config, generation_config)
        target = target_of(model, _tokenizer(source, tokenizer, config), name=name)
    if template is not None:
        replace_chat_template(target, template, where=str(chat_template))
    return target


def skeleton_of(config: Any, dtype: str) -> Any:
    """A model of transformers on the meta device."""
    with torch.device("meta"), PROCESS_SETTINGS:
        return _auto_class(config).from_config(
            config,
            **_loading_options(config, dtype),
            # Its shapes do not depend on the experts that tokens choose.
            experts_implementation="batched_mm",
        )


def read_target_spec(
    name: str | Path,
    *,
    dtype: str,
    device: str = "cpu",
    tokenizer: str | Path | None = None,
) -> TargetSpec:
    """Read a target's config and tokenizer, where another program (vLLM) runs its weights.

    Args:
        dtype: that it will run in.
        device: that it will run on.
        tokenizer: see `read_target`.

    Raises:
        InputError, UnknownModelError, UnsupportedTargetError: see `moaspec.load_target`.
    """
    require_dtype(dtype)
    name = str(name)
    with _named_errors(name, tokenizer, weights=False) as source:
        config = _read_config(source, name)
        require_supported(config, name)  # other models need a self-test with their weights
        return TargetSpec(
            config,
            _tokenizer(source, tokenizer, config),
            name=name,
            dtype=DTYPES[dtype],
            generation_config=_generation_config(source, config, "auto"),
            device=device,
        )


def _is_family_gguf(name: str, tokenizer: str | Path | None) -> bool:
    """Whether a target is a GGUF file whose layers are of a family that we know."""
    if find_target_gguf(name) is None:
        return False
    with _named_errors(name, tokenizer, weights=False) as source:
        return is_family(_read_config(source, name))


def _stored_model(source: str, name: str, dtype: str) -> Any:
    """The model of a GGUF file, whose quantised weights stay there.

    Args:
        source: see `described`.
    """
    gguf = find_target_gguf(name)
    assert gguf is not None, name
    config = _read_config(source, name)
    with named_errors(name, gguf, _remedy(name)):
        file = read_by_index(gguf, Path(source) / INDEX)
        model = skeleton_of(config, dtype)
        fill_from_file(model, sources(config, architecture_of(file), file), file)
    return model


@contextmanager
def _named_errors(
    name: str, tokenizer: str | Path | None = None, *, weights: bool = True
) -> Iterator[str]:
    """Find a target's weights, and turn the libraries' errors into ours, which name the target.

    Args:
        tokenizer: a directory that makes the target's own tokenizer superfluous.
        weights: False if its config and tokenizer are enough: a GGUF file is not dequantised.

    Yields:
        A directory, or a hub id.

    Raises:
        UnknownModelError: the weights are not here, or cannot be used.
    """
    if tokenizer is not None:
        _require_tokenizer(Path(tokenizer))
    source = _find(name, dequantised if weights else described)
    if tokenizer is None:
        require_readable_tokenizer(Path(source))
    try:
        if not is_directory(Path(source)):
            source = str(cached_if_offline(source) or source)
        elif (reason := why_not_files(Path(source))) is not None:
            raise _unusable_target(name, source, reason)
        yield source
    except HubError as error:
        raise _unusable_target(name, source, str(error)) from error
    except MoaSpecError:
        raise
    # The libraries raise almost anything where files are damaged or configs are impossible.
    except Exception as error:
        raise _unusable_target(name, source, first_line(error)) from error


def _generation_config(source: str, config: Any, kept: str | None) -> GenerationConfig:
    """The model's generation config; only its stop tokens if `kept` is None."""
    try:
        found = GenerationConfig.from_pretrained(source)
    except OSError as error:  # many directories have none, and others a damaged one
        if (Path(source) / GENERATION_CONFIG_NAME).exists() or "valid JSON" in str(error):
            raise
        found = GenerationConfig.from_model_config(config)
    for name, one in ((GENERATION_CONFIG_NAME, found), ("config.json", config)):
        check_ends(getattr(one, "eos_token_id", None), config.get_text_config().vocab_size, name)
    check_numbers(found, GENERATION_CONFIG_NAME)
    return found if kept else without_defaults(found)


def require_dtype(dtype: str, *others: str) -> None:
    """Refuse a name that is no dtype of a target.

    Args:
        others: further names that the caller takes, for the message.

    Raises:
        InputError: lists the names.
    """
    if dtype not in DTYPES:
        names = ", ".join((*DTYPES, *others))
        raise InputError(f"Unknown dtype {dtype!r}; choose one of {names}.")


def require_device(device: str) -> None:
    """Refuse a device that cannot be used here. InputError: says why."""
    try:
        if torch.empty(0, device=device).is_meta:
            raise InputError("Device 'meta' holds no numbers; try 'cpu'.")
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(
            f"Device {device!r} cannot be used here; try 'cpu'. Cause: {first_line(error)}"
        ) from error


def _read_config(source: str, name: str) -> Any:
    """The config of a model that may be supported."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except OSError:
        raise
    except Exception:
        _require_raw_rope(source, name)  # names the field, as transformers does not
        raise
    _require_raw_rope(source, name)
    check = require_supported if is_family(config) else require_generic_config
    check(config, name)
    return config


def _require_raw_rope(source: str, name: str) -> None:
    raw, _ = PreTrainedConfig.get_config_dict(source)
    require_rope(raw, name)


def _auto_class(config: Any) -> Any:
    """Transformers' class that makes a model of this config."""
    # A wrapper with a text part has a class for images and text, and mostly no other.
    has_parts = config.get_text_config(decoder=True) is not config
    return AutoModelForImageTextToText if has_parts else AutoModelForCausalLM


def _loading_options(config: Any, dtype: str) -> dict[str, Any]:
    return {
        # Unset, transformers asks whether to run a repository's own code.
        "trust_remote_code": False,
        "dtype": DTYPES[dtype],
        # Unset, transformers takes "eager" for models that "sdpa" cannot compute.
        "attn_implementation": "sdpa" if is_family(config) else None,
    }


def _load_model(source: str, name: str, dtype: str) -> Any:
    """The model, if its files hold all of its weights and nothing else."""
    config = _read_config(source, name)
    prepare_config(config, name)
    with PROCESS_SETTINGS, _in_this_thread():
        loaded: Any = _auto_class(config).from_pretrained(
            source,
            config=config,
            **_loading_options(config, dtype),
            # Ours is the clearer refusal.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, info = loaded
    widen(model)
    problem = _key_problem(info) or _value_problem(model)
    if problem is not None:
        raise _unusable_target(name, source, problem)
    return model


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """Have transformers load without threads of its own.

    The C library never frees some memory of each thread, and there is little to do: weights stay in
    the mapped file unless they are cast.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _key_problem(info: Mapping[str, Any]) -> str | None:
    """Tensors that transformers would initialise at random, or ignore, with a warning only.

    Tied heads and buffers that it expects to be missing are not among its keys.
    """
    if info["mismatched_keys"]:
        key, got, expected = min(info["mismatched_keys"])
        return f"{key} has shape {tuple(got)}, and its config asks for {tuple(expected)}."
    for kind in ("missing", "unexpected"):
        keys = sorted(info[f"{kind}_keys"])
        if keys:
            return f"{len(keys)} tensors are {kind} ({', '.join(keys[:3])}, ...)."
    return None


def _value_problem(model: Any) -> str | None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"{name} has NaN or infinite values in {str(parameter.dtype)[6:]}."
    return None


def _unusable_target(name: str, source: str, cause: str) -> UnknownModelError:
    if Path(source).is_dir():
        what = f"the directory {source} is damaged or holds no model that can be used"
    elif name in ALIASES:
        what = f"the hub does not give {source}. {_not_here(name)}"
    else:
        what = (
            f"it is no alias ({', '.join(ALIASES)}), no model directory and no hub id that can be "
            "reached and used"
        )
    return UnknownModelError(f"Cannot load the target {name!r}: {what}. Cause: {cause}")


def find_weights(name: str) -> str:
    """Directory or hub id of a target's weights, in a form that transformers and vLLM load.

    Raises:
        UnknownModelError: neither an alias, a directory nor a GGUF file, and no hub id by its form;
            or a GGUF that cannot be read.
    """
    return _find(name, dequantised)


def _remedy(name: str) -> str:
    """What to do where a target's GGUF file is damaged."""
    return (
        f"`moaspec models get {name}` fetches it anew" if name in ALIASES else "Download it again"
    )


def _find(name: str, convert: Callable[..., Path]) -> str:
    """Directory or hub id of a target; a GGUF file is converted."""
    alias = ALIASES.get(name)
    if alias is None:
        return _resolved(name, convert)
    gguf = local_gguf(alias)
    if gguf is not None:
        return str(convert(name, gguf, _alias_key(name, gguf), remedy=_remedy(name)))
    if alias.gguf_repository:
        raise UnknownModelError(f"{_not_here(name)}.")
    return alias.hub_id


def _not_here(name: str) -> str:
    alias = ALIASES[name]
    return (
        f"The file of {name} is not here: `moaspec models get {name}` fetches it "
        f"({alias.size / 1e6:.0f} MB)"
    )


def find_target_gguf(name: str) -> Path | None:
    """The GGUF file (or its first part) that a target is read from; None for other targets."""
    alias = ALIASES.get(name)
    return find_gguf(Path(name)) if alias is None else local_gguf(alias)


def _alias_key(name: str, gguf: Path) -> str:
    return f"{name}-{gguf.stat().st_size}-{CONVERSION}"


def _resolved(name: str, convert: Callable[..., Path]) -> str:
    """The directory, GGUF file or hub id of a name that is no alias."""
    path = Path(name)
    gguf = find_gguf(path)
    if gguf is not None:
        return str(convert(name, gguf, key_of(gguf), remedy=_remedy(name)))
    if is_file(path):
        raise UnknownModelError(
            f"{name!r} is a file, and no GGUF. Name the directory that holds config.json and the "
            "weights, or a file that ends in .gguf."
        )
    # Asking the hub for a misspelt alias or file would take it half a minute to say no.
    if not is_directory(path) and (is_gguf_name(path) or not _could_be_hub_id(name)):
        raise UnknownModelError(
            f"Unknown target {name!r}: not an alias ({', '.join(ALIASES)}), a directory or a GGUF "
            "file. A hub id has the form owner/name."
        )
    return name


def _could_be_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _tokenizer(source: str, given: str | Path | None, config: Any) -> Any:
    """The given directory's tokenizer, else the target's own."""
    if given is None:
        return load_tokenizer(source)
    found = load_tokenizer(str(given))
    largest, rows = max(found.get_vocab().values()), config.get_text_config().vocab_size
    if largest >= rows:
        raise InputError(
            f"The tokenizer in {given} is of another model: its largest id is {largest}, and the "
            f"target has {rows} tokens."
        )
    return found


def _require_tokenizer(directory: Path) -> None:
    if not (directory / TOKENIZER_JSON).is_file():
        raise InputError(
            f"--tokenizer {directory} holds no {TOKENIZER_JSON}. Name a directory with that file "
            "of the model, and its tokenizer_config.json."
        )


def read_chat_template(path: Path) -> str:
    """A file with a chat template; InputError where it cannot be read."""
    try:
        template = read_limited(path, MAX_TEMPLATE_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot read the chat template {path}: {error}") from error
    if not template.strip():
        raise InputError(f"The chat template {path} is empty.")
    return template


def replace_chat_template(target: TargetSpec, template: str, *, where: str) -> None:
    """Give the target's tokenizer another chat template.

    Raises:
        InputError: there is no tokenizer, or the template does not render a question.
    """
    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        raise InputError(
            f"{target.name} has no tokenizer, so a chat template is of no use. Give one with "
            "--tokenizer."
        )
    tokenizer.chat_template = template
    question = [{"role": "user", "content": "Hello"}]
    if "Hello" not in ChatTemplate(tokenizer, where).rendered(question):
        raise InputError(f"The chat template {where} does not render what a user says.")


def load_tokenizer(source: str) -> Any:
    """The tokenizer, or None for a model directory that has none (token ids still work)."""
    try:
        # The class that a config names may split words by rules of its own.
        kind: Any = PreTrainedTokenizerFast if _has_tokenizer_json(source) else AutoTokenizer
        return kind.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, TypeError):
        if Path(source).is_dir() and not (Path(source) / TOKENIZER_JSON).exists():
            return None
        raise


def _has_tokenizer_json(source: str) -> bool:
    if Path(source).is_dir():
        return (Path(source) / TOKENIZER_JSON).exists()
    found = cached_file(
        source,
        TOKENIZER_JSON,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found is not None


def named_verifier(name: str, config: Any) -> Verifier:
    """What a checkpoint records of the target of this name (see `find_weights`) and config."""
    return Verifier(
        name=hub_id(name), architectures=tuple(getattr(config, "architectures", None) or ())
    )
