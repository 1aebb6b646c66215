"""Notes on a run's precision, draft vocabulary and drafter, before the first step."""

import torch

from moaspec.backends.linear_backends import compute_dtype
from moaspec.generation.destinations import destinations
from moaspec_train.data_order import DataOrder
from moaspec_train.dataset.examples import coverage
from moaspec_train.run_config import TrainConfig
from moaspec_train.students.students import Student

USES = {
    "publish": "moaspec checkpoint convert",
    "vllm": "vLLM",
    "device": "moaspec checkpoint export-device",
}


def emulation(config: TrainConfig) -> str | None:
    """A sentence on settings in bf16 that this CPU emulates; None if there are none."""
    on_cpu = torch.device(config.device).type == "cpu"
    if not on_cpu or compute_dtype(torch.bfloat16) == torch.bfloat16:
        return None
    faster = {"mixed_precision": ("bf16", "no"), "target_dtype": ("bfloat16", "float32")}
    changes = [
        f"{name}={better}"
        for name, (slow, better) in faster.items()
        if getattr(config, name) == slow
    ]
    if not changes:
        return None
    return (
        "This CPU has neither AVX512-BF16 nor AMX. Without bf16 instructions bf16 is emulated, "
        f"several times slower than float32. Faster: {' '.join(changes)}."
    )


def setting_notes(config: TrainConfig) -> list[str]:
    """Sentences on settings that cost time or learning, before anything is loaded."""
    notes, slow = [], emulation(config)
    if slow is not None:
        notes.append(slow)
    if config.warmup_steps > config.steps:
        notes.append(
            f"The learning rate reaches {100 * config.steps / config.warmup_steps:.2g}% of "
            f"learning_rate, because warmup_steps={config.warmup_steps} is above "
            f"steps={config.steps}."
        )
    return notes


def run_notes(student: Student, config: TrainConfig, data: DataOrder) -> list[str]:
    """Sentences on the draft vocabulary, and on where the drafter can be used."""
    return [*_vocabulary(student, config, data), *_uses(student)]


def _vocabulary(student: Student, config: TrainConfig, data: DataOrder) -> list[str]:
    ids, asked = student.draft_token_ids, config.sizes.draft_vocab
    if ids is None:
        return []
    note = f"Draft vocabulary: {len(ids)} tokens"
    if len(ids) < asked:
        note += (
            f", fewer than sizes.draft_vocab={asked}, because the training responses have no others"
        )
    share = coverage((data.examples[i] for i in data.held_out_ids), ids)
    covered = "" if share is None else f" It has {share:.2%} of the held-out response tokens."
    return [f"{note}.{covered}"]


def _uses(student: Student) -> list[str]:
    found = destinations(student.module, student.target)
    works = [USES[place] for place, problem in found.items() if problem is None]
    notes = [f"The drafter will work with: {', '.join(works)}."] if works else []
    return notes + [
        f"It will not work with {USES[place]}: {problem}"
        for place, problem in found.items()
        if problem is not None
    ]
