"""Measures a machine when it first drafts by cost, if that takes only seconds."""

import contextlib
import time
from collections.abc import Callable

import numpy as np
import torch

from moaspec.calibration import measure_costs
from moaspec.calibration.assumed_costs import machine_costs, num_weights, target_pass_s
from moaspec.calibration.choose_layers import LayersOption, layers_options
from moaspec.calibration.round_parts import RoundParts
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.support.paths import cache_dir, why_not_writable
from moaspec_core.support.switches import setting

SWITCH = "MOASPEC_CALIBRATE"
"""Environment variable: "off" leaves measuring to `moaspec calibrate`."""
MAX_EXPECTED_S = 15.0  # longer measurements are left to `moaspec calibrate`
MAX_IDLE_S = 120.0  # the same for processes that have nothing else to do
TIME_LIMIT_S = 30.0  # a measurement is given up then: other processes began to use the CPU
BUSY = "other processes use the CPU"
MIN_WEIGHTS = 10_000_000  # smaller targets are not measured
SAMPLES = 3
"""Passes that are timed for an estimate; the fastest counts."""
OTHER_PARTS = 60.0  # parts of a round other than passes, in passes over one token


def measure_once(
    target: Target,
    drafter: MoADrafter,
    *,
    num_target_layers: int | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> tuple[list[LayersOption], str | None]:
    """Measure and store the costs of a round, unless that was done while the CPU was free.

    Returns:
        See `layers_options`; and why nothing was measured, or None if all is measured.
    """
    layers = num_target_layers
    options = layers_options(target, drafter, num_target_layers=layers)
    busy = any(option.costs is not None and option.costs.busy for option in options)
    if options[0].costs is not None and not busy:
        return options, None
    why_not = _why_not(target, MAX_EXPECTED_S)
    if why_not is not None:
        return options, why_not
    advance("loading its parts")
    due_s = time.monotonic() + TIME_LIMIT_S

    def stopped() -> bool:
        if time.monotonic() > due_s:
            raise _GivenUpError
        return False

    try:
        measure_costs.calibrate(
            target, drafter, num_target_layers=layers, quick=True, advance=advance, stopped=stopped
        )
    except _GivenUpError:
        return options, BUSY
    except OSError as error:
        return options, f"its costs cannot be stored ({error.strerror or error})"
    return layers_options(target, drafter, num_target_layers=layers), None


def measure_again(
    target: Target,
    drafter: MoADrafter,
    used: int | None,
    num_target_layers: int | None,
    *,
    fits: bool,
    stopped: Callable[[], bool],
) -> bool:
    """Measure an idle machine, and store the costs, if there is a reason to.

    Args:
        used: N of the drafts now.
        num_target_layers: N to measure; None: each that the drafter was trained for.
        fits: whether the costs in use agree with what was observed.
        stopped: as in `calibrate`; the measurement is then dropped.

    Returns:
        Whether costs were measured: there was a reason, and nothing prevented it.
    """
    before = measure_costs.stored_costs(target, drafter, num_target_layers=used)
    if fits and before is not None and not before.busy:
        return False
    if _why_not(target, MAX_IDLE_S) is not None:
        return False

    def given_up() -> bool:
        if stopped() or target.crowded:
            raise _GivenUpError
        return False

    with contextlib.suppress(_GivenUpError, OSError):
        measure_costs.calibrate(
            target, drafter, num_target_layers=num_target_layers, stopped=given_up
        )
        return True
    return False


class _GivenUpError(Exception):
    """A measurement took too long."""


def _why_not(target: Target, most_s: float) -> str | None:
    if setting(SWITCH) == "off":
        return f"{SWITCH} is off"
    if num_weights(target) < MIN_WEIGHTS:
        return f"{target.name} is too small to gain by it"
    reason = why_not_writable(cache_dir())
    if reason is not None:
        return reason
    seconds = expected_s(target)
    # Asked after the passes that this took: the reading of before may be as old as the program.
    if target.crowded:
        return BUSY
    return f"that takes about {seconds:.0f} s" if seconds > most_s else None


def expected_s(target: Target) -> float:
    """Seconds that a quick calibration will take here, from the fastest of some passes."""
    if target.token_pass_s is None:
        target.token_pass_s = _token_pass_s(target)
    of = machine_costs(target)
    seconds = target_pass_s(target, of)
    widths = np.interp(measure_costs.TOKENS, of.tokens, seconds) / seconds[0]
    # Each pass is timed behind one like it.
    turn = 2 * len(measure_costs.CONTEXTS) * float(widths.sum()) + OTHER_PARTS
    return target.token_pass_s * turn * (measure_costs.WARM_UPS + measure_costs.QUICK_TURNS.least)


def _token_pass_s(target: Target) -> float:
    one_pass = RoundParts(target, None).target_pass(1, 1)
    with torch.inference_mode():
        one_pass.time(counts=False)
        for _ in range(SAMPLES):
            one_pass.time()
    return min(one_pass.seconds)
