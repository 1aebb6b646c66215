"""`speculators_config` in `config.json`: target and drafts as the package speculators has them.

Source: `SpeculatorModelConfig` and `SpeculatorsConfig` of speculators 0.9.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moaspec_core.errors import CorruptCheckpointError, MismatchError

SECTION, TYPE, VERSION = "speculators_config", "speculators_model_type", "speculators_version"
MOA = "moa"
"""The type of MoA drafters. Speculators knows it after `moaspec.register_speculators_type()`."""
FORMAT = "0.9.0"
METHOD = "greedy"  # the only proposal method of speculators 0.9
DRAFT_TOKENS = 3
"""Tokens of a chain of drafts, where nothing else is recorded."""
MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """The target that a drafter was made for, by its name on the hub.

    Attributes:
        name: hub id, or None for a model that is not on the hub.
        architectures: of the target's own `config.json`.
        draft_tokens: tokens of a chain of drafts.
    """

    name: str | None
    architectures: tuple[str, ...] = ()
    draft_tokens: int = DRAFT_TOKENS


def speculators_fields(verifier: Verifier | None, kind: str = MOA) -> dict[str, Any]:
    """Fields of `config.json`; none without a verifier.

    Args:
        kind: of the drafter. Only MoA gets a `speculators_model_type`: speculators has no type for
            the baselines.
    """
    if verifier is None:
        return {}
    section = {
        "algorithm": kind,
        "default_proposal_method": METHOD,
        "proposal_methods": [
            {
                "proposal_type": METHOD,
                "speculative_tokens": verifier.draft_tokens,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
    }
    own_type = {TYPE: MOA} if kind == MOA else {}
    return {**own_type, VERSION: FORMAT, SECTION: section}


def read_verifier(config_json: Mapping[str, Any], kind: str = MOA) -> Verifier | None:
    """The recorded target of one of our checkpoints; None if it has no `speculators_config`.

    Raises:
        CorruptCheckpointError: the section is damaged.
        MismatchError: it contradicts the checkpoint's own fields.
    """
    section = config_json.get(SECTION)
    if section is None:
        return None
    try:
        named = section["verifier"]
        verifier = Verifier(
            name=_text_or_none(named["name_or_path"]),
            architectures=tuple(map(str, _listed(named["architectures"]))),
            draft_tokens=_tokens(section["proposal_methods"], section["default_proposal_method"]),
        )
        algorithm = section["algorithm"]
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{SECTION} in config.json is damaged ({type(error).__name__}: {error}). Write it anew "
            "with `moaspec checkpoint convert --to moaspec`, or remove it."
        ) from error
    stated = {f"{SECTION}.algorithm": algorithm, TYPE: config_json.get(TYPE, kind)}
    for field, value in stated.items():
        if value != kind:
            raise MismatchError(
                f"config.json has a drafter of kind {kind!r}, and {field} {value!r}: correct or "
                f"remove {field}."
            )
    return verifier


def _tokens(methods: Sequence[Mapping[str, Any]], default: str) -> int:
    by_type = {one["proposal_type"]: one["speculative_tokens"] for one in _listed(methods)}
    tokens = by_type[default]
    if type(tokens) is not int or not 1 <= tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"speculative_tokens is {tokens!r}, not 1 to {MAX_DRAFT_TOKENS}")
    return tokens


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _text_or_none(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise TypeError(f"name_or_path is {value!r}")
    return value
