"""Loading a target and its drafter for a command that decodes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli.options import NO_DRAFTER
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import loading, measuring

if TYPE_CHECKING:
    from moaspec.model.moa import MoADrafter
    from moaspec.target.target import Target
    from moaspec_core.cli.options import LoadOptions
    from moaspec_core.drafting.protocols import Proposer


def load(asked: LoadOptions, *, device: str = "cpu") -> tuple[Target, MoADrafter | Proposer | None]:
    """Load target and drafter, and print their dtype, number of threads and kernels."""
    with loading(asked.model, asked.threads, asked.quantize):
        return load_pair(asked, device=device)


def load_pair(
    asked: LoadOptions,
    *,
    device: str = "cpu",
    generation_config: Literal["auto"] | None = "auto",
) -> tuple[Target, MoADrafter | Proposer | None]:
    """`load` for a command that is inside `loading` already."""
    from moaspec.backends.load import load_target
    from moaspec.generation.drafters import check_any_drafter

    if asked.drafts and asked.drafter is not None:
        check_any_drafter(asked.drafter, asked.model, tokenizer=asked.tokenizer)
    target = load_target(
        asked.model,
        dtype=asked.dtype,
        device=device,
        quantize=asked.quantize,
        adapter=asked.adapter,
        tokenizer=asked.tokenizer,
        chat_template=asked.chat_template,
        generation_config=generation_config,
    )
    module = choose_drafter(asked.drafter, asked.model, target)
    console.err.print(target_summary(target), style="dim")
    return target, module


def choose_drafter(name: str | None, model: str, target: Target) -> MoADrafter | Proposer | None:
    """The named drafter, else the one bundled for this target, else none (plain decoding)."""
    from moaspec.generation.drafters import load_any_drafter

    if name == NO_DRAFTER:
        return None
    if name is not None:
        return load_any_drafter(name, target=target)
    if model in bundled_drafters():
        return load_any_drafter(model, target=target)
    console.err.print(f"No drafter is bundled for {model}: decoding plainly.", style="yellow")
    return None


def target_summary(target: Target) -> str:
    """The target's name, dtype and number of threads, and the kernels that compute it."""
    import torch

    from moaspec.backends.cpu.build import instructions

    parts = [f"{target.name} in {target.precision}"]
    if target.adapter is not None:
        parts.append(f"adapter {target.adapter}")
    if target.device.type == "cpu":
        parts.append(num_threads(torch.get_num_threads(), "CPU "))
        kernels = instructions() if target.packed and target.dtype == torch.bfloat16 else None
        parts.append(f"{kernels.upper()} kernels" if kernels else "PyTorch's kernels")
    else:
        parts.append(str(target.device))
    return ", ".join(parts)


def num_threads(threads: int, kind: str = "") -> str:
    """A number of threads in words."""
    return f"{threads} {kind}{'thread' if threads == 1 else 'threads'}"


def measure_once(target: Target, module: MoADrafter | Proposer | None) -> None:
    """Measure this machine at the first use of --tree auto, with a status line.

    Not where the clock may correct shipped costs: there nobody waits.
    """
    from moaspec.backends.fast_target import same_bits
    from moaspec.calibration import first_use
    from moaspec.model.moa import MoADrafter

    if not isinstance(module, MoADrafter) or same_bits(target):
        return
    with measuring() as advance:
        options, why_not = first_use.measure_once(target, module, advance=advance)
    if why_not is not None:
        warn_unmeasured(why_not, busy=options[0].costs is not None)


@cache
def warn_unmeasured(why_not: str, *, busy: bool) -> None:
    """One line, once per process.

    Args:
        why_not: why the machine is not measured now.
        busy: whether it was measured before while other processes used the CPU.
    """
    said = f"This machine is not measured, because {why_not}. Few or no drafts are made"
    if busy:
        said = (
            "This machine was measured while other processes used its CPU, and is not measured "
            f"again, because {why_not}. Drafts may gain less than they could"
        )
    console.err.print(f"{said}; `moaspec calibrate` measures the machine.", style="dim")
