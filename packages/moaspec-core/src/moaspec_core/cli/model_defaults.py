"""Which of a model's own generation defaults a command uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moaspec_core.cli.terminal import console

if TYPE_CHECKING:
    from moaspec_core.engine.device_target import DeviceTarget
    from moaspec_core.engine.generate_options import GenerateOptions
    from moaspec_core.sampling.generation_defaults import GenerationDefaults


def print_defaults(
    target: DeviceTarget, defaults: GenerationDefaults, *, optional: bool = True
) -> None:
    """Print which of the model's own generation defaults apply, if any.

    Args:
        optional: whether the command has --generation-config.
    """
    if defaults.words:
        hint = " --generation-config none leaves them out." if optional else ""
        console.err.print(f"Defaults of {target.name}: {defaults.words}.{hint}", style="dim")


def with_model_defaults(
    settings: GenerateOptions, target: DeviceTarget, *, optional: bool = True
) -> GenerateOptions:
    """Fill in the temperature from the model's defaults, and `print_defaults`."""
    from moaspec_core.engine.generate_options import defaults_of

    defaults = defaults_of(target, settings)
    print_defaults(target, defaults, optional=optional)
    if settings.get("temperature") is not None:
        return settings
    return {**settings, "temperature": defaults.temperature or 0.0}
