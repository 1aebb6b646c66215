"""An engine with target and drafter in this process."""

from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.engine.recurrent_verifier import local_verifier
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target, plain_torch
from moaspec_core.drafting.protocols import PROPOSER_METHODS, Proposer
from moaspec_core.engine.engine import Engine
from moaspec_core.errors import InputError


def local_engine(
    target: Target,
    drafter: MoADrafter | Proposer | None = None,
    *,
    num_target_layers: int | None = None,
) -> Engine:
    """An engine with target and drafter in this process.

    Args:
        drafter: a trained module, any object with the methods of `Proposer`, or None.
        num_target_layers: N of a trained module; None takes its default.

    Raises:
        InputError: something that is no drafter, or N for a drafter that reuses no layers.
    """
    verifier, proposer = local_parts(target, drafter, num_target_layers=num_target_layers)
    return Engine(verifier, proposer, target=target)


@plain_torch()
def local_parts(
    target: Target,
    drafter: MoADrafter | Proposer | None = None,
    *,
    num_target_layers: int | None = None,
) -> tuple[LocalVerifier, Proposer | None]:
    """Verifier and proposer of `local_engine`, for callers with an engine of their own."""
    proposer = _proposer(target, drafter, num_target_layers)
    verifier = local_verifier(target, proposer)
    if isinstance(proposer, MoAProposer):
        proposer.share_target_cache(verifier.cache)
    return verifier, proposer


def _proposer(
    target: Target, drafter: MoADrafter | Proposer | None, num_target_layers: int | None
) -> Proposer | None:
    if isinstance(drafter, MoADrafter):
        return FastMoAProposer(drafter, target, num_target_layers=num_target_layers)
    if isinstance(drafter, Target):
        raise InputError(
            f"{drafter.name} is a language model: give generate ModelProposer(model, target) of it."
        )
    if num_target_layers is not None and drafter is not None:
        raise InputError(
            f"num_target_layers={num_target_layers} is for Mixture-of-Attentions drafters; "
            f"{type(drafter).__name__} reuses no layers. Leave it out."
        )
    missing = [name for name in PROPOSER_METHODS if not hasattr(drafter, name)]
    if drafter is not None and missing:
        raise InputError(
            f"A drafter must be a MoADrafter or have the methods of moaspec's Proposer protocol; "
            f"{type(drafter).__name__} lacks {', '.join(missing)}."
        )
    return drafter
