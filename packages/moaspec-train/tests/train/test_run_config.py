"""Settings of a run: validation, YAML, overrides."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

import tiny
from moaspec_core.errors import InputError
from moaspec_train.recipes import RECIPES
from moaspec_train.run_config import TrainConfig, launched_processes, read_train_config
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config
from moaspec_train.students.losses import LossWeights

BASE = "target: tiny\ndata: [a.jsonl, b.jsonl]\noutput: out\n"


def read(tmp_path: Path, text: str = BASE, *overrides: str) -> TrainConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return read_train_config(path, overrides)


def test_yaml_and_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, BASE + "loss: {kl: 0.5}\nbetas: [0.8, 0.9]\nsteps: 7\n")
    assert config.data == ("a.jsonl", "b.jsonl")
    assert config.steps == 7
    assert config.betas == (0.8, 0.9)
    assert (config.loss.kl, config.loss.feature) == (0.5, 1.0)
    assert config.sizes == DrafterSizes()


def test_overrides_win_and_reach_inside(tmp_path: Path) -> None:
    text = BASE + "steps: 7\nloss: {feature: 2.0}\n"
    config = read(
        tmp_path, text, "steps=9", "loss.kl=0.25", "sizes.draft_vocab=16", "data=[c.jsonl]"
    )
    assert config.steps == 9
    assert (config.loss.kl, config.loss.feature) == (0.25, 2.0)
    assert config.sizes.draft_vocab == 16
    assert config.data == ("c.jsonl",)


def test_a_value_may_hold_an_equals_sign(tmp_path: Path) -> None:
    assert read(tmp_path, BASE, "output=a=b").output == "a=b"


@pytest.mark.parametrize(
    "override", ["stps=3", "loss.k1=3", "sizes.heads=2", "loss.kl.more=1", "optimizer.lr=1"]
)
def test_unknown_keys(override: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read(tmp_path, BASE, override)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("stps=3", "steps"),
        ("batchsize=3", "batch_size"),
        ("Batch-Size=3", "batch_size"),
        ("lr=1e-3", "learning_rate"),
        ("lerning_rate=1e-3", "learning_rate"),
        ("draft_vocab=100", r"sizes\.draft_vocab"),
        ("size.draft_vocab=100", "sizes"),
        ("sizes.draft_vocabs=100", r"sizes\.draft_vocab"),
        ("sizes.draft-vocab=", r"sizes\.draft_vocab"),
        ("kl=0.5", r"loss\.kl"),
        ("loss.fature=1", r"loss\.feature"),
    ],
)
def test_the_key_nearest_to_an_unknown_one_is_named(
    override: str, nearest: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"Unknown key .*; did you mean {nearest}\?$"):
        read(tmp_path, BASE, override)


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("sharding=deepspeed", "use sharding=fsdp"),
        ("anchors=rounds", "random places"),
        ("accumulation=4", "pass_tokens"),
        ("loss.survival=0.5", "hybrid"),
        ("loss.divergence=reverse_kl", "use hybrid"),
        ("loss.divergence=total_variation", "use hybrid"),
        ("loss.divergence=negative_log_acceptance", "use hybrid"),
    ],
)
def test_settings_of_earlier_versions_are_refused_by_name(
    override: str, instead: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"{override} is no longer supported: .*{instead}"):
        read(tmp_path, BASE, override)


def test_a_setting_of_earlier_versions_that_did_nothing_is_skipped(tmp_path: Path) -> None:
    old = read(tmp_path, BASE, "anchors=random", "loss.survival=0.0", "accumulation=1")
    assert old == read(tmp_path, BASE)


def test_where_none_is_near_all_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Unknown key 'zzzz'; known: .*batch_size.*weight_decay"):
        read(tmp_path, BASE, "zzzz=3")


@pytest.mark.parametrize(
    ("written", "name", "value"),
    [
        ("data=a.jsonl", "data", ("a.jsonl",)),
        ("data=a.jsonl,b.jsonl", "data", ("a.jsonl", "b.jsonl")),
        ("data=2024", "data", ("2024",)),
        ("num_target_layers=3", "num_target_layers", (3,)),
        ("num_target_layers=0,1", "num_target_layers", (0, 1)),
        ("num_target_layers=[0, 1]", "num_target_layers", (0, 1)),
        ("trackers=tensorboard", "trackers", ("tensorboard",)),
        ("betas=0.8,0.9", "betas", (0.8, 0.9)),
        ("staircase=yes", "staircase", True),
        ("staircase='True'", "staircase", True),
        ("staircase=1", "staircase", True),
        ("staircase=off", "staircase", False),
        ("learning_rate=1e-3", "learning_rate", 1e-3),
        ("learning_rate=2E-3", "learning_rate", 2e-3),
        ("steps=1e3", "steps", 1000),
        ("steps=5_000", "steps", 5000),
        ("steps=0100", "steps", 100),
        ("seed=9007199254740993", "seed", 9007199254740993),
        ("output=007", "output", "007"),
        ("license=no", "license", "no"),
        ("initial=", "initial", ""),
        ("adapter=null", "adapter", ""),
        ("--max-length=64", "max_length", 64),
    ],
)
def test_values_as_people_write_them(
    written: str, name: str, value: object, tmp_path: Path
) -> None:
    config = read(tmp_path, BASE, written)
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)


def test_values_of_a_file_as_people_write_them(tmp_path: Path) -> None:
    text = "target: tiny\noutput: 7\ndata: a.jsonl\nsteps: 1e3\nsizes: {without: sa}\n"
    config = read(tmp_path, text)
    assert (config.output, config.data, config.steps) == ("7", ("a.jsonl",), 1000)
    assert config.sizes.without == ("sa",)


@pytest.mark.parametrize(
    "words",
    [
        ("steps", "=", "9", "loss.kl=0.25"),
        ("steps", "=9", "loss.kl=", "0.25"),
        ("steps=", "9", "loss.kl = 0.25"),
        ("--steps", "9", "--loss.kl=0.25"),
        ("license=", "steps=9", "--loss.kl", "=", "0.25"),
    ],
    ids=str,
)
def test_overrides_cut_by_spaces(words: tuple[str, ...], tmp_path: Path) -> None:
    config = read(tmp_path, BASE, *words)
    assert (config.steps, config.loss.kl, config.license) == (9, 0.25, "")


@pytest.mark.parametrize("words", [("--dryrun",), ("--dryrun", "steps=3")], ids=str)
def test_words_that_are_no_option(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no option --dryrun"):
        read(tmp_path, BASE, *words)


@pytest.mark.parametrize("override", ["steps=true", "held_out=no", "sizes.layers=yes"])
def test_a_number_is_neither_true_nor_false(override: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a number"):
        read(tmp_path, BASE, override)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("steps=many", "steps"),
        ("learning_rate=[1]", "learning_rate"),
        ("data={}", "data must be a list"),
        ("steps=1:30", "steps"),
        ("loss=3", "mapping"),
        ("betas=[0.9]", "betas"),
        ("loss.kl=much", r"loss\.kl"),
        ("device=mps", r"device.*'cpu' or 'cuda'"),
    ],
)
def test_wrong_types(override: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=name):
        read(tmp_path, BASE, override)


@pytest.mark.parametrize("override", ["steps", "", "steps 3", "loss.kl: 3"])
def test_overrides_are_key_value(override: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="key=value"):
        read(tmp_path, BASE, override)


def test_overrides_that_are_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data: '\[a' is no value in YAML"):
        read(tmp_path, BASE, "data=[a")


@pytest.mark.parametrize("text", ["", "target: tiny\n", "a: [", "- 1\n- 2\n", "just text", "3"])
def test_unusable_files(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just text"])
def test_an_override_of_what_is_no_mapping(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read(tmp_path, text, "steps=3")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        read_train_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"steps": 0},
        {"shortest_block": 0},
        {"save_every": 0},
        {"max_length": 0},
        {"shortest_block": 9, "longest_block": 8},
        {"longest_block": 10**20},
        {"held_out": -1},
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"clip": 0.0},
        {"warmup_steps": -1},
    ],
    ids=str,
)
def test_impossible_values(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        TrainConfig(**{"target": "tiny", "data": ("a",), "output": "out"} | change)


@pytest.mark.parametrize("change", [{"steps": 0}, {"longest_block": 1}])
def test_impossible_values_in_a_file(change: dict[str, int], tmp_path: Path) -> None:
    (key, value) = next(iter(change.items()))
    with pytest.raises(InputError, match=key):
        read(tmp_path, BASE, f"{key}={value}")


def test_default_sizes_are_the_targets() -> None:
    config = drafter_config(tiny.target(), DrafterSizes())
    lsa, sa = config.layer_self_attention, config.self_attention
    assert (lsa.num_heads, lsa.num_kv_heads, lsa.head_dim, lsa.intermediate_size) == (4, 4, 8, 32)
    assert (sa.num_heads, sa.num_kv_heads, sa.head_dim, sa.intermediate_size) == (6, 2, 8, 56)
    assert config.cross_attention == sa
    assert config.target == tiny.target().identity


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_drafter_for_every_family(family: str) -> None:
    target = tiny.target(family)
    config = drafter_config(target, DrafterSizes())
    biases = family == "qwen2"
    assert config.self_attention.head_dim == config.cross_attention.head_dim == target.head_dim
    assert config.kv_size == 2 * 2 * target.head_dim
    assert config.self_attention.qkv_bias == biases
    assert config.layer_self_attention.qkv_bias  # the warm start writes its preferences there
    assert not config.cross_attention.qkv_bias
    assert config.rms_norm_eps == target.config.rms_norm_eps
    assert config.hidden_act == ("gelu_pytorch_tanh" if family == "gemma3_text" else "silu")


def test_sa_takes_the_rope_of_full_attention() -> None:
    config = drafter_config(tiny.target("gemma3_text"), DrafterSizes())
    assert config.rope_theta == 5000.0
    assert config.rope_parameters["rope_type"] == "linear"
    longrope = drafter_config(tiny.target("phi3"), DrafterSizes()).rope_parameters
    assert longrope["original_max_position_embeddings"] == tiny.SWITCH


def test_sizes_of_ones_own() -> None:
    sizes = DrafterSizes(
        lsa_heads=2,
        lsa_kv_heads=1,
        lsa_intermediate=10,
        sa_intermediate=11,
        sa_kv_heads=6,
        ca_intermediate=12,
        ca_kv_heads=1,
    )
    config = drafter_config(tiny.target(), sizes)
    lsa = config.layer_self_attention
    assert (lsa.num_heads, lsa.num_kv_heads, lsa.head_dim, lsa.intermediate_size) == (2, 1, 16, 10)
    assert config.self_attention.num_kv_heads == 6
    assert config.self_attention.intermediate_size == 11
    assert config.cross_attention.num_kv_heads == 1
    assert config.cross_attention.intermediate_size == 12


@pytest.mark.parametrize("heads", [3, 32, -1])
def test_heads_that_do_not_fit(heads: int) -> None:
    with pytest.raises(InputError):
        drafter_config(tiny.target(), DrafterSizes(lsa_heads=heads))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_ready_configs_are_valid(path: Path) -> None:
    assert read_train_config(path, ["data=[mine.jsonl]"]).data == ("mine.jsonl",)


@pytest.mark.parametrize(
    "change",
    [
        {"num_target_layers": ()},
        {"num_target_layers": (1, 1)},
        {"num_target_layers": (-1,)},
        {"sharding": "fsdp", "frozen_lsa": 0.5},
        {"sharding": "deepspeed"},
        {"drafter": "eagle", "num_target_layers": (1,)},
        {"drafter": "independent", "frozen_lsa": 0.5},
        {"shard_mb": -1.0},
        {"weight_decay": math.nan},
        {"learning_rate": 1e38},
        {"learning_rate": 0.0},
        {"final_lr": math.nan},
        {"final_lr": -3.0},
        {"frozen_lsa": 2.0},
        {"betas": (2.0, 3.0)},
        {"seed": 2**80},
        {"drafter": "eagle", "staircase": True},
        {"drafter": "eagle", "sizes": DrafterSizes(without=("sa",))},
        {"drafter": "eagle", "sizes": DrafterSizes(sa_layers=2)},
        {"sizes": DrafterSizes(publishable=True, sa_layers=2)},
        {"sizes": DrafterSizes(publishable=True, draft_vocab=9)},
        {"sizes": DrafterSizes(publishable=True), "num_target_layers": (0, 1)},
        {"sizes": DrafterSizes(publishable=True), "drafter": "eagle"},
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        TrainConfig(**{"target": "tiny", "data": ("a",), "output": "out"} | change)


def test_an_unknown_divergence_is_refused() -> None:
    with pytest.raises(InputError, match=r"one of forward_kl, .*, got reverse_kl"):
        LossWeights(**dict[str, Any](divergence="reverse_kl"))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["kl", "summary"])
def test_weights_of_losses(name: str, weight: float) -> None:
    with pytest.raises(InputError, match=rf"loss\.{name}"):
        LossWeights(**dict[str, Any]({name: weight}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "Cannot read"),
        (b"1: 2", r"c\.yaml: Unknown key"),
        (b"loss: 3", r"c\.yaml: loss: expected a mapping"),
        (b"target: t\noutput: o\ndata: {}", r"data must be a list, for example data="),
        (b"target: t\noutput: o\ndata: [a]\nseed: -1", r"c\.yaml: seed must be within"),
    ],
)
def test_files_that_are_no_config(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    with pytest.raises(InputError, match=message):
        read_train_config(path)


def test_sizes_to_publish() -> None:
    """LSA has the target's heads, if they divide K; other sizes win."""
    target = tiny.fresh_target(num_attention_heads=4, hidden_size=64)
    lsa = drafter_config(target, DrafterSizes(publishable=True)).layer_self_attention
    assert (lsa.num_heads, lsa.head_dim * 4) == (4, target.identity.kv_size)
    sizes = DrafterSizes(publishable=True, lsa_heads=2)
    assert drafter_config(target, sizes).layer_self_attention.num_heads == 2
    with pytest.raises(InputError, match="does not divide"):
        drafter_config(
            tiny.fresh_target(num_attention_heads=6), DrafterSizes(publishable=True, lsa_heads=7)
        )


def test_more_reused_layers_than_there_are() -> None:
    with pytest.raises(InputError, match="3 layers"):
        drafter_config(tiny.target(), DrafterSizes(), (4,))


@pytest.mark.parametrize("written", ["no", "'no'", "No"])
def test_no_is_a_word_in_yaml(written: str, tmp_path: Path) -> None:
    assert read(tmp_path, BASE, f"mixed_precision={written}").mixed_precision == "no"


@pytest.mark.parametrize("text", ["steps: 3\nsteps: 4\n", "loss: {kl: 1, feature: 2, kl: 1}\n"])
def test_a_key_named_twice_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config.yaml: the key '(steps|kl)' occurs twice"):
        read(tmp_path, BASE + text)
    with pytest.raises(InputError, match="occurs twice"):
        read(tmp_path, BASE, "loss={kl: 1, kl: 2}")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["abc", "-1", "1.5", ""])
def test_variables_of_a_launcher_that_are_no_numbers(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launched_processes() == 1
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=rf"\${name}.* must be a number; got '{value}'"):
        launched_processes()


def test_a_rank_is_below_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched_processes() == 2
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(InputError, match=r"\$WORLD_SIZE=2, \$RANK=2"):
        launched_processes()


REPEATED = [f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]


@pytest.mark.parametrize(
    "value",
    [
        *("9" * 1_000_000, "1" + ":1" * 100_000, "0x" + "f" * 100_000, "2001-99-99"),
        *("2001-01-01 99:99:99", "[" * 50_000, "{" * 50_000, "&a [*a]", "? [a]\n: 1", "*a"),
        *("!!x 1", "!!python/object/apply:os.system [x]", "1e999999", ".nan", "!!binary x"),
        *(
            "[" * 5000,
            "!!timestamp x",
            "!!int x",
            "\x00",
            "\ud800",
            f"[&a0 [x], {', '.join(REPEATED)}]",
        ),
    ],
)
def test_values_of_yaml_that_take_long_or_fail(value: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(f"steps: {value}\n".encode(errors="surrogatepass"))
    with pytest.raises(InputError) as caught:
        read_train_config(path)
    assert "training config" in str(caught.value).lower()
    assert len(str(caught.value)) < 2000
    small = tmp_path / "small.yaml"
    small.write_text("steps: 5\n")
    with pytest.raises(InputError) as caught:
        read_train_config(small, [f"steps={value}"])
    assert len(str(caught.value)) < 2000


def test_a_pipe_without_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(InputError, match="a FIFO"):
        read_train_config(tmp_path / "run.yaml")
