"""LoRA adapters of a target, merged into its weights when it is loaded.

An adapted target is another target, with other text. Kernels and packing see ordinary weights.
"""

import hashlib
import json
import logging
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moaspec_core.checkpoint.user_files import read_json, why_not_tensors
from moaspec_core.errors import InputError
from moaspec_core.support.causes import first_line
from moaspec_core.support.extras import require
from moaspec_core.tokens.names import ALIASES

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK, MAX_PISSA_STEPS, MAX_PATTERN, MAX_REPEATS = 1 << 14, 100, 1000, 4
_BASE = "base_model_name_or_path"
_NO_PART = ("auto_mapping", _BASE, "inference_mode", "peft_version", "revision")
"""Fields of `adapter_config.json` that do not change the merged weights."""


def read_adapter(directory: str | Path) -> dict[str, Any]:
    """The config of an adapter that can be merged; InputError if there is none, or no peft."""
    require("--adapter", "moaspec[adapter]")
    path = Path(directory)
    missing = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
    if missing:
        raise InputError(
            f"The adapter {directory} has no {' and no '.join(missing)}. Name the directory to "
            "which peft's save_pretrained wrote a LoRA adapter."
        )
    try:
        config = read_json(path / CONFIG)
        kind = config["peft_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path / CONFIG} cannot be read, or is of no adapter: {error}") from error
    if kind != "LORA":
        raise InputError(
            f"The adapter {directory} is of the kind {kind}; only LORA is merged into weights here."
        )
    reason = _why_unusable(config) or why_not_tensors(path / WEIGHTS)
    if reason is not None:
        raise InputError(f"The adapter {directory} cannot be used: {reason}.")
    found: dict[str, Any] = config
    return found


def _why_unusable(config: Mapping[str, Any]) -> str | None:
    """What in a config would take peft very long, or very much memory; None for nothing."""
    initial = re.fullmatch(r"pissa_niter_(\d+)", str(config.get("init_lora_weights")))
    if initial is not None and (len(initial[1]) > 3 or int(initial[1]) > MAX_PISSA_STEPS):
        return f"init_lora_weights asks for more than {MAX_PISSA_STEPS} steps"
    ranks = {"r": config.get("r", 8), **_mapping(config, "rank_pattern")}
    for name, rank in ranks.items():
        if type(rank) is not int or not 0 < rank <= MAX_RANK:
            return f"its rank {name[:100]} is {str(rank)[:20]}, not 1 to {MAX_RANK}"
    modules = [config.get(name) for name in ("target_modules", "exclude_modules")]
    patterns = [module for module in modules if isinstance(module, str)]
    patterns += [*_mapping(config, "rank_pattern"), *_mapping(config, "alpha_pattern")]
    slow = next((pattern for pattern in patterns if not _is_quick(pattern)), None)
    if slow is not None:
        return (
            f"the pattern {slow[:100]!r} is wrong, or takes long to search with; name the modules "
            "in a list, or repeat single characters only, at most four times in each alternative"
        )
    return None


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name) or {}
    return found if isinstance(found, dict) else {}


def _is_quick(pattern: str) -> bool:
    """Whether a regular expression is searched without much backtracking."""
    if len(pattern) > MAX_PATTERN:
        return False
    try:
        return _repeats(re._parser.parse(pattern)) <= MAX_REPEATS  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError):
        return False


def _repeats(parsed: Any) -> float:
    """Repeats that one way through a parsed expression passes; infinity for nested ones."""
    return math.fsum(_repeats_of(operator, argument) for operator, argument in parsed)


def _repeats_of(operator: Any, argument: Any) -> float:
    if str(operator) == "BRANCH":
        return max(map(_repeats, argument[1]))
    if "REPEAT" in str(operator) and argument[1] > 1:
        return 1 if _is_single(argument[2]) else math.inf
    parts = argument if isinstance(argument, tuple) else (argument,)
    return math.fsum(_repeats(part) for part in parts if isinstance(part, re._parser.SubPattern))  # type: ignore[attr-defined]


def _is_single(body: Any) -> bool:
    """Whether one character or one set of characters is repeated."""
    return len(body) == 1 and str(body[0][0]) in {"ANY", "IN", "LITERAL", "NOT_LITERAL"}


def adapter_hash(directory: str | Path) -> str:
    """Identity of an adapter: SHA-256 over its weights and the settings that scale them.

    Returns:
        16 hexadecimal digits.

    Raises:
        InputError: see `read_adapter`.
    """
    config = read_adapter(directory)
    kept = {name: value for name, value in config.items() if name not in _NO_PART}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    with (Path(directory) / WEIGHTS).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def merged(model: Any, directory: str | Path, name: str) -> Any:
    """A model of transformers with an adapter's product added to its weights, in their dtype.

    Logs a warning where the adapter names another base model.

    Args:
        model: as it was loaded; its weights change.
        directory: of the adapter.

    Raises:
        InputError: see `read_adapter`; or it was made for another model, leaves weights of the
            model or of itself unused, or the model is quantised.
    """
    config = read_adapter(directory)
    _require_mergeable(model, config, directory, name)
    _tell_other_base(model, config.get(_BASE), directory, name)
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    try:
        with warnings.catch_warnings(), safe_open(Path(directory) / WEIGHTS, "pt") as file:
            warnings.simplefilter("ignore")  # of missing tensors, which are refused below
            adapted = PeftModel.from_pretrained(model, str(directory))
            _require_tied(adapted, directory, name)
            stored = set(file.keys())
            missing = set(get_peft_model_state_dict(adapted, save_embedding_layers=False)) - stored
            # peft stores the model's own matrix beside an adapter of the embedding or the head.
            unused = stored - set(get_peft_model_state_dict(adapted, save_embedding_layers=True))
            # Refuses numbers that are not finite: of a damaged adapter, or too large for the dtype.
            whole = None if missing or unused else adapted.merge_and_unload(safe_merge=True)
    except InputError:
        raise
    # peft and safetensors raise almost anything where an adapter and a model do not fit.
    except Exception as error:
        raise InputError(
            f"The adapter {directory} cannot be merged into {name}. Cause: {first_line(error)}"
        ) from error
    if whole is None:
        raise InputError(
            f"The adapter {directory} does not fit {name}: {len(unused)} of its tensors "
            f"have no place in the model, {len(missing)} are missing."
        )
    return whole


def _tell_other_base(model: Any, made_for: str | None, directory: str | Path, name: str) -> None:
    """Warn of an adapter made for a model of another name: only the sizes are checked."""
    names = [
        name,
        model.name_or_path,
        *(ALIASES[alias].hub_id for alias in ALIASES if alias == name),
    ]
    if made_for and _last_part(made_for) not in map(_last_part, names):
        log.warning(
            "The adapter %s was made for %s, and is merged into %s. Make sure that these are the "
            "same model: in another one of the same sizes its weights mean nothing.",
            directory,
            made_for,
            name,
        )


def _last_part(name: str) -> str:
    """Of a hub id or a path, without regard to case."""
    return str(name).replace("\\", "/").rstrip("/").rpartition("/")[2].lower()


def _require_mergeable(
    model: Any, config: dict[str, Any], directory: str | Path, name: str
) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        raise InputError(
            f"{name} is quantised, and an adapter merged into rounded weights would be rounded "
            "too. Load the model that it was rounded from."
        )
    if config.get("layer_replication"):
        raise InputError(
            f"The adapter {directory} repeats layers of {name} (layer_replication). "
            "Merge it with peft, and load the result."
        )


def _require_tied(adapted: Any, directory: str | Path, name: str) -> None:
    """Refuse an adapter of a tied embedding or head: merging would change the other one too."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    ends = (adapted.get_input_embeddings(), adapted.get_output_embeddings())
    if adapted.config.tie_word_embeddings and any(
        isinstance(end, (LoraLayer, ModulesToSaveWrapper)) for end in ends
    ):
        raise InputError(
            f"The adapter {directory} changes the embedding or the LM head, which in {name} are "
            "one matrix. Merge it with peft, and load the result."
        )
