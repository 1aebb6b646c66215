"""Where else a drafter can be used: the published forms, vLLM, a device."""

from moaspec.model.baselines import Baseline, IndependentDrafter
from moaspec.model.checkpoint.published import Form, published_problem
from moaspec.model.moa import MoADrafter
from moaspec.target.families import is_family
from moaspec.target.spec import TargetSpec
from moaspec_core.checkpoint.drafter_config import DrafterConfig
from moaspec_core.tokens.names import SUPPORTED_FAMILIES

FORMS: tuple[Form, ...] = ("raw", "vllm")


def destinations(drafter: MoADrafter | Baseline, target: TargetSpec) -> dict[str, str | None]:
    """For each place, a sentence why a drafter cannot be used there; None if it can.

    Args:
        drafter: may be on the meta device: only its sizes and vocabulary are used.
        target: that it drafts for.

    Returns:
        By place: "publish" (`moaspec checkpoint convert --to raw` or `vllm`), "vllm" (the plugin),
        "device" (`moaspec checkpoint export-device`).
    """
    return {
        "publish": _publish_problem(drafter, target),
        "vllm": _family_problem(target)
        or vllm_problem(drafter.config if isinstance(drafter, MoADrafter) else None),
        "device": device_problem(drafter, target),
    }


def _publish_problem(drafter: MoADrafter | Baseline, target: TargetSpec) -> str | None:
    if not isinstance(drafter, MoADrafter):
        return "The published forms are those of Mixture-of-Attentions drafters."
    found = (
        published_problem(drafter, form, target=target.identity, context=target.config)
        for form in FORMS
    )
    return next(filter(None, found), None)


def _family_problem(target: TargetSpec) -> str | None:
    if is_family(target.config):
        return None
    return (
        f"Inside vLLM drafts are for the families {', '.join(SUPPORTED_FAMILIES)}, and the target "
        f"is a {target.config.model_type!r} model. Serve it with `moaspec serve`."
    )


def vllm_problem(config: DrafterConfig | None) -> str | None:
    """Why vLLM's plugin cannot use a drafter, or None.

    Args:
        config: None for a drafter of another kind.
    """
    if config is None:
        return "Inside vLLM only Mixture-of-Attentions drafters draft. Train one with drafter=moa."
    if 0 not in config.num_target_layers:
        return (
            f"This drafter reuses the target's last layers (num_target_layers "
            f"{', '.join(map(str, config.num_target_layers))}), which is not implemented inside "
            "vLLM. Train one with num_target_layers=[0]."
        )
    if "ca" in config.without:
        return (
            "This drafter was trained without cross-attention (an ablation), which is what vLLM's "
            "cache holds for it. Train one with sizes.without=[]."
        )
    if config.rope_parameters.get("rope_type") == "longrope":
        return (
            "This drafter's target has LongRoPE: all of a text's keys change when it outgrows "
            "its first regime, and vLLM's cache cannot follow. Serve it with `moaspec serve`."
        )
    return None


def device_problem(drafter: object, target: TargetSpec) -> str | None:
    """Why no bundle for a device can be made of it, or None."""
    if target.tokenizer is None:
        return f"The target {target.name} has no tokenizer, and a device needs one."
    if not isinstance(drafter, MoADrafter | IndependentDrafter):
        return (
            "This drafter needs activations that a server does not send; use a "
            "Mixture-of-Attentions drafter or an independent one."
        )
    if "ca" in getattr(drafter.config, "without", ()):
        return (
            "This drafter was trained without cross-attention (an ablation): it reads "
            "aggregates, and a server sends cross-attention's keys and values."
        )
    return None
