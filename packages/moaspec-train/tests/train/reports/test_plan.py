"""Plans of runs, against small runs and against published sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import generic_models
import hybrid_models
import tiny
from moaspec.target.families import is_family
from moaspec.target.generic.generic_target import target_of
from moaspec.target.registry import skeleton_of
from moaspec.target.target import Target
from moaspec_core.errors import InputError
from moaspec_train.cli.plan_table import plan_table
from moaspec_train.dataset.examples import Example
from moaspec_train.recipes import RECIPES, recipes
from moaspec_train.reports.plan import (
    GPUS,
    GPUs,
    Plan,
    active_parameters,
    cpu_operations_per_s,
    make_plan,
)
from moaspec_train.run_config import TrainConfig, read_train_config
from moaspec_train.students.drafter_sizes import DrafterSizes
from moaspec_train.trainer import Trainer

LENGTH = 60
EXAMPLES = [Example(range(20), [(7 * i + j) % tiny.VOCAB for j in range(40)]) for i in range(6)]


def settings(output: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        **{"target": "tiny", "data": ("-",), "output": str(output), "held_out": 2},
        **{"batch_size": 4, "steps": 2, "save_every": 2, "warmup_steps": 1},
        "max_length": LENGTH,
    }
    return TrainConfig(**values | changes)


def plan(config: TrainConfig, family: str = "llama", **options: Any) -> Plan:
    return make_plan(skeleton(tiny.target(family).config), config, EXAMPLES, **options)


def skeleton(config: PreTrainedConfig, dtype: str = "float32") -> Target:
    return target_of(skeleton_of(config, dtype), None, name="skeleton")


def kept(directory: Path) -> int:
    """Bytes of kept activations."""
    files = (*directory.rglob("*.data"), *directory.rglob("*.index"))
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("layers", [(0,), (2, 0)], ids=str)
def test_disk_and_parameters_of_a_run(layers: tuple[int, ...], tmp_path: Path) -> None:
    config = settings(tmp_path, num_target_layers=layers, frozen_lsa=0.5)
    run = Trainer(tiny.target(), EXAMPLES, config)
    run.run()
    found = plan(config)
    assert found.num_parameters == run.student.module.num_parameters
    # The held-out ones were measured after LSA had begun to learn.
    trained = config.batch_size / len(EXAMPLES)
    assert kept(tmp_path / "activations") == found.cache_bytes["activation_cache"]
    assert kept(tmp_path / "means") == trained * found.cache_bytes["frozen_lsa"]
    state = load_file(next((tmp_path / "state").rglob("*.safetensors")))
    # AdamW's step counts, and a norm that both halves of the drafter hold, are not in the formula.
    assert sum(tensor.nbytes for tensor in state.values()) == pytest.approx(
        found.state_bytes, rel=0.01
    )
    drafter = load_file(tmp_path / "drafter" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in drafter.values()) == found.checkpoint_bytes


@pytest.mark.parametrize("drafter", ["eagle", "independent"])
def test_disk_and_parameters_of_a_baseline(drafter: str, tmp_path: Path) -> None:
    config = settings(tmp_path, drafter=drafter)
    run = Trainer(tiny.target(), EXAMPLES, config)
    run.run()
    found = plan(config)
    assert found.parameters == {drafter: sum(p.numel() for p in run.student.module.parameters())}
    assert found.cache_bytes == {"activation_cache": kept(tmp_path / "activations")}


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_target_layers": (2,)}, {"drafter": "eagle"}, {"mixed_precision": "bf16"}],
    ids=str,
)
def test_peak_memory_is_within_a_factor_of_two(changes: dict[str, Any], tmp_path: Path) -> None:
    """What a step allocates: gradients, and the pass that autograd and the logits fill.

    The formula leaves out what operations take and free at once, and counts the chunk's logits
    generously, so a factor of two is stated.
    """
    config = settings(tmp_path, **changes)
    run = Trainer(tiny.target(), EXAMPLES, config)
    run.train_step()  # makes the moments, which are no part of what follows
    found = plan(config)
    assert found.pass_tokens == 4 * LENGTH
    expected = found.memory["pass"] + 4 * found.num_parameters
    assert expected / 2 < _peak(run.train_step) < expected * 2


def _peak(work: Callable[[], Any]) -> int:
    """Largest sum of what is allocated and not freed yet, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
        work()
    assert recorder.profiler is not None
    events = [
        event for event in recorder.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_sharded_memory(tmp_path: Path) -> None:
    whole = plan(settings(tmp_path)).memory["drafter and AdamW"]
    assert plan(settings(tmp_path, sharding="fsdp"), processes=4).memory[
        "drafter and AdamW"
    ] == pytest.approx(whole / 4, rel=1e-3)
    with pytest.raises(InputError, match="several processes"):
        plan(settings(tmp_path, sharding="fsdp"))


def test_a_budget(tmp_path: Path) -> None:
    def size(number: Any, **changes: Any) -> int:
        config = settings(tmp_path, sizes=DrafterSizes(parameters=number), **changes)
        return plan(config).num_parameters

    for drafter in ("moa", "eagle", "independent"):
        # Widths are multiples of 64, which are 5% of so small a drafter.
        assert 376_000 < size(400_000, drafter=drafter, warm_start=False) <= 400_000
    with pytest.raises(InputError, match="attentions alone have"):
        size(1000, warm_start=False)
    with pytest.raises(InputError, match="warm_start needs SA"):
        size(400_000)


def test_a_budget_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("target: t\noutput: o\ndata: []\n")
    for text, number in (("250M", 250_000_000), ("1.5B", 1_500_000_000), ("7", 7)):
        assert read_train_config(path, [f"sizes.parameters={text}"]).sizes.parameters == number
    for wrong in ("many", "3X", "-M"):
        with pytest.raises(InputError, match="parameters"):
            read_train_config(path, [f"sizes.parameters={wrong}"])
    with pytest.raises(InputError, match="leave these out"):
        read_train_config(path, ["sizes.parameters=1M", "sizes.sa_intermediate=9"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": DrafterSizes(lsa_heads=3)}, "does not divide"),
        ({"sizes": DrafterSizes(draft_vocab=65)}, "has 64 tokens"),
        ({"sizes": DrafterSizes(draft_vocab=-1)}, "has 64 tokens"),
        ({"num_target_layers": (4,)}, "3 layers"),
        ({"held_out": 6}, "too few"),
        ({"sizes": DrafterSizes(sa_intermediate=99)}, "warm_start needs SA"),
    ],
    ids=str,
)
def test_what_cannot_be_trained(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        plan(settings(tmp_path, **changes))


def test_names_of_gpus() -> None:
    assert GPUs.parse("h100") == GPUs("h100")
    assert GPUs.parse("8xA100") == GPUs("a100", 8)
    for wrong in ("h1", "0xh100", "xh100", ""):
        with pytest.raises(InputError, match="8xh100"):
            GPUs.parse(wrong)


_LLAMA: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "max_position_embeddings": 8192,
}
PUBLISHED: dict[str, tuple[PreTrainedConfig, float, float]] = {
    # Sizes as their makers publish them; the target's parameters, the drafter's at most.
    "llama-3-8b": (LlamaConfig(**_LLAMA), 8.03e9, 250e6),
    "llama-3.1-8b": (LlamaConfig(**_LLAMA), 8.03e9, 250e6),
    "qwen3-8b": (
        Qwen3Config(
            **_LLAMA
            | {"intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936}
            | {"head_dim": 128}
        ),
        8.19e9,
        250e6,
    ),
    "qwen3-30b-a3b": (
        Qwen3MoeConfig(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            vocab_size=151936,
        ),
        30.5e9,
        120e6,
    ),
    "gpt-oss-20b": (
        GptOssConfig(num_hidden_layers=24, num_local_experts=32),
        20.9e9,
        110e6,
    ),
    "gemma-3-270m": (
        Gemma3TextConfig(
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            vocab_size=262144,
        ),
        268e6,
        10e6,
    ),
    "qwen2.5-0.5b": (
        Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
        494e6,
        31e6,
    ),
    "smollm2-135m": (
        LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            tie_word_embeddings=True,
        ),
        134.5e6,
        8.12e6,
    ),
}
PUBLISHED["qwen2.5-coder-0.5b"] = (PUBLISHED["qwen2.5-0.5b"][0], 494e6, 18.5e6)
PUBLISHED["first-try"] = PUBLISHED["smollm2-135m"]


@pytest.mark.parametrize("kind", generic_models.KINDS)
def test_a_skeleton_knows_the_keys_and_values_of_any_model_type(kind: str) -> None:
    whole = target_of(generic_models.model(kind), None, name=kind)
    assert skeleton(generic_models.config(kind)).identity == whole.identity


def test_every_ready_config_is_counted() -> None:
    assert PUBLISHED.keys() == recipes().keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_ready_configs(name: str) -> None:
    config, target_size, most = PUBLISHED[name]
    run = read_train_config(RECIPES / f"{name}.yaml")
    target = skeleton(config, run.target_dtype)
    found = make_plan(target, run, processes=8 if name == "llama-3-8b" else 1)
    assert found.target_parameters == pytest.approx(target_size, rel=0.005)
    assert 0.95 * most < found.num_parameters <= most
    problem = found.problems["publish"]
    # What keeps the others is their draft vocabulary alone, not a number of heads.
    assert problem is None if not run.sizes.draft_vocab else "draft_vocab=0" in str(problem)
    assert (found.problems["vllm"] is None) == is_family(config)
    needed = sum(found.memory.values())
    room = GPUS["h200" if name == "qwen3-30b-a3b" else "h100"][1]
    assert needed < room, "the first line of the file names a GPU"
    if name == "qwen3-30b-a3b":
        assert active_parameters(target) < 0.12 * sum(p.numel() for p in target.model.parameters())


FEWER_KEYS = {
    "num_hidden_layers": ("gemma3n_text", "gemma4_text", "gemma4", "lfm2", "zamba2", "qwen3_5"),
    "num_key_value_heads": (
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"),
        *("gpt2", "gpt_neox", "persimmon"),
    ),
}
"""Types of whose layers or heads fewer, or more, have keys than their config says."""


@pytest.mark.parametrize(
    ("field", "kind"), [(field, kind) for field, kinds in FEWER_KEYS.items() for kind in kinds]
)
def test_keys_that_published_configs_cannot_record(field: str, kind: str, tmp_path: Path) -> None:
    hybrid = kind in hybrid_models.KINDS
    config = (hybrid_models.model(kind) if hybrid else generic_models.model(kind)).config
    problem = make_plan(skeleton(config), settings(tmp_path)).problems["publish"]
    assert f"{field} is {getattr(config.get_text_config(), field)} in the checkpoint" in str(
        problem
    )


def cells(
    found: Plan, config: TrainConfig, gpus: GPUs | None, cpu_operations_per_s: float = 0.0
) -> dict[str, str]:
    rows = plan_table(found, config, gpus, cpu_operations_per_s).rows
    return {row[0]: row[1] for row in rows}


def test_the_table(tmp_path: Path) -> None:
    config = settings(tmp_path, device="cuda", sizes=DrafterSizes(draft_vocab=32))
    rows = cells(plan(config), config, GPUs("h100", 2))
    assert rows["GPU memory"].endswith("h100 has 80 GB: fits")
    assert rows["data"] == "360 tokens"
    assert rows["published forms"].startswith("no. ")
    assert rows["vLLM"] == "yes"
    assert "2 x h100" in rows["time, by formula"]
    assert rows["disk, activation_cache"].startswith("on: ")
    assert rows["disk, frozen_lsa"].startswith("off: ")
    frozen = settings(tmp_path, frozen_lsa=1.0)
    rows = cells(plan(frozen), frozen, None)
    assert rows["disk, activation_cache"].startswith("off: ")
    assert rows["disk, frozen_lsa"].startswith("on: ")
    on_cpu = cells(plan(settings(tmp_path)), config, None)
    assert "memory a process" in on_cpu
    assert "time, by formula" not in on_cpu


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layers", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize("sa_layers", [1, 2])
def test_operations_are_those_of_a_step(
    optimizer: Any, layers: tuple[int, ...], sa_layers: int, tmp_path: Path
) -> None:
    """Without frozen parts; attention, which is not in the formula, is little here."""
    config = settings(
        tmp_path,
        num_target_layers=layers,
        optimizer=optimizer,
        activation_cache=False,
        sizes=DrafterSizes(sa_layers=sa_layers),
        held_out=0,
        steps=1,
        warm_start=False,
    )
    examples = [Example(one.prompt_ids, one.response_ids[:10]) for one in EXAMPLES]
    run = Trainer(tiny.target(), examples, config)
    with FlopCounterMode(display=False) as counted:
        run.train_step()
    found = make_plan(skeleton(tiny.target().config), config, examples)
    assert counted.get_total_flops() == pytest.approx(found.operations, rel=0.3)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_time_on_this_cpu(precision: Any, tmp_path: Path) -> None:
    config = settings(tmp_path, mixed_precision=precision)
    rate = cpu_operations_per_s(config)
    assert rate > 1e7
    rows = cells(plan(config), config, None, plan(config).operations / 3600)
    assert rows["time, by formula"].startswith("at least 1.0 h on this CPU: ")
