"""Writing checkpoints in the two published forms.

The forms record few sizes: readers assume the target's number of heads for every attention. Saving
a drafter that they cannot describe raises an error.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from moaspec.model.checkpoint.moa_checkpoint import published_parameters, published_tensors
from moaspec.model.checkpoint.moa_config import infer_config
from moaspec.model.checkpoint.weight_files import write_config, write_weights
from moaspec.model.moa import MoADrafter
from moaspec_core.checkpoint.drafter_config import DrafterConfig, TargetIdentity, activation_name
from moaspec_core.errors import CheckpointError, MismatchError, ShapeError

Form = Literal["raw", "vllm"]
_NOT_SIZES = {
    *("num_target_layers", "target", "acceptance", "further_acceptance"),
    *("trained_positions", "prompt_window"),
}
"""Fields of `DrafterConfig` that published checkpoints never record."""


def save_published(
    drafter: MoADrafter, directory: str | Path, form: Form, *, target: TargetIdentity, context: Any
) -> None:
    """Write a checkpoint as the authors publish them.

    Args:
        directory: created when missing; a checkpoint in it is replaced.
        form: "raw", whose config is the target's own, or "vllm", the authors' converted form.
        context: the target's transformers config.

    Raises:
        CheckpointError: the form cannot describe this drafter.
    """
    problem = published_problem(drafter, form, target=target, context=context)
    if problem is not None:
        raise CheckpointError(problem)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory, published_tensors(drafter))
    write_config(directory, _config(form, target, context))


def published_problem(
    drafter: MoADrafter, form: Form, *, target: TargetIdentity, context: Any
) -> str | None:
    """Why a form cannot describe this drafter (also on the meta device); None if it can.

    Args: see `save_published`.
    """
    if drafter.draft_token_ids is not None or drafter.exits:
        return (
            "The published forms know neither a trimmed draft vocabulary nor exits; train with "
            "sizes.draft_vocab=0 and, from the start, one num_target_layers to convert."
        )
    if drafter.config.self_attention_layers > 1:
        return "The published forms have one layer of SA (sizes.sa_layers)."
    if drafter.config.without:
        return "The published forms know no ablations (sizes.without)."
    tensors = published_parameters(drafter)
    try:
        read = infer_config(_config(form, target, context), tensors, target, context)
    except ShapeError as error:
        return f"The {form} form cannot describe this drafter: {error}"
    except MismatchError as error:  # the target's config says more layers or KV heads
        return f"The {form} form records the target's config, by which readers refuse it: {error}"
    return _difference(read, drafter.config, form)


def _config(form: Form, target: TargetIdentity, context: Any) -> dict[str, Any]:
    found: dict[str, Any] = context.to_dict()
    return found if form == "raw" else _converted_config(target, context)


def _converted_config(target: TargetIdentity, context: Any) -> dict[str, Any]:
    """The config that the authors' converter writes: without layer count and KV heads."""
    return {
        "architectures": ["MOASpecModel"],
        "model_type": "moa_spec",
        "hidden_size": target.hidden_size,
        "kv_hidden_size": target.kv_size,
        "num_attention_heads": int(context.num_attention_heads),
        "rms_norm_eps": float(context.rms_norm_eps),
        "hidden_act": activation_name(context),
        "vocab_size": target.vocab_size,
    }


def _difference(read: DrafterConfig, meant: DrafterConfig, form: Form) -> str | None:
    """Compare the config that a reader will infer with the drafter's."""
    wrong = []
    for field in dataclasses.fields(DrafterConfig):
        got, expected = getattr(read, field.name), getattr(meant, field.name)
        if field.name not in _NOT_SIZES and got != expected:
            wrong.append(f"{field.name} would be read as {got} and is {expected}")
    if not wrong:
        return None
    return (
        f"The {form} form cannot describe this drafter: {'; '.join(wrong)}. It takes the "
        "target's number of heads for every attention (sizes.lsa_heads); keep the checkpoint as "
        "it is."
    )


def recorded(drafter: MoADrafter, target: TargetIdentity, num_target_layers: int) -> MoADrafter:
    """The drafter with target and N in its config, if it was published; ShapeError for N < 0."""
    if drafter.config.target is None:
        drafter.config = dataclasses.replace(
            drafter.config, target=target, num_target_layers=(num_target_layers,)
        )
    return drafter
