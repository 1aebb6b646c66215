"""Keyword arguments of `generate` and `stream`."""

from moaspec.model.moa import MoADrafter
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.engine.generate_options import GenerateOptions


class Options(GenerateOptions, total=False):
    """Keyword arguments of `generate` and `stream`, in addition to `GenerateOptions`.

    Attributes:
        drafter: proposes tokens: a `MoADrafter`, or any object with the methods of the `Proposer`
            protocol; None (the default) decodes plainly.
        num_choices: continuations per prompt, each with noise of its own; with more than one,
            every prompt gives a list of results.
        num_target_layers: N, target layers that the drafter reuses. None takes its default: the
            first, or with `tree="auto"` the fastest on this machine, if `moaspec calibrate` has
            measured several.
    """

    drafter: MoADrafter | Proposer | None
    num_choices: int
    num_target_layers: int | None
