"""LoRA adapters: the adapted model's text, of a target that is another one than its base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moaspec
import tiny
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.target.target import Target
from moaspec.target.weights.adapter import CONFIG, WEIGHTS, adapter_hash
from moaspec_core.errors import InputError
from moaspec_edge.protocol import identity
from moaspec_train.run_config import TrainConfig
from moaspec_train.students.initial_drafter import load_initial_drafter

pytest.importorskip("peft", reason="the extra adapter is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of peft

PROMPT = tiny.PROMPTS[1]
NEW_TOKENS = 16


def save_adapter(base: Target, directory: Path, seed: int = 0, **changes: Any) -> Any:
    """A random adapter, large enough to change texts; returns peft's own model of it."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
    torch.manual_seed(seed)
    adapted: Any = get_peft_model(base.model, LoraConfig(**(settings | changes)))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "lora_embedding" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(directory)
    return adapted.eval()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    tiny.fresh_target().model.save_pretrained(directory)
    return directory


def text(target: Target, **options: Any) -> list[int]:
    return moaspec.generate(target, PROMPT, max_new_tokens=NEW_TOKENS, **options).token_ids


EMBEDDING, HEAD = "embed_tokens", "lm_head"


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"target_modules": ["q_proj", EMBEDDING, HEAD]}],
)
def test_text_is_the_adapted_models(changes: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """As peft itself decodes, without merging."""
    exact = moaspec.load_target(base, dtype="float32", packed=False)
    adapted = save_adapter(exact, tmp_path / "adapter", **changes)
    ids = torch.tensor([PROMPT])
    expected = adapted.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    plain = moaspec.load_target(base, dtype="float32")
    for packed in (False, True):
        target = moaspec.load_target(
            base, dtype="float32", adapter=tmp_path / "adapter", packed=packed
        )
        assert text(target) == expected
        assert text(target, drafter=tiny.random_drafter(target)) == expected
    assert text(plain) != expected


def test_identity_is_not_the_base_models(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A drafter of the base model still drafts, which is said; the wire tells adapters apart."""
    targets: dict[int | None, Target] = {None: moaspec.load_target(base, packed=False)}
    for seed in (0, 1):
        place = tmp_path / f"adapter{seed}"
        save_adapter(moaspec.load_target(base, packed=False), place, seed=seed)
        targets[seed] = moaspec.load_target(base, packed=False, adapter=place)
    identities = [target.identity for target in targets.values()]
    assert len(set(identities)) == 3
    assert [identity.from_message(identity.to_message(one)) for one in identities] == identities
    plain, first, second = identities
    assert identity.difference(plain, first) is None
    assert "adapter" in (identity.difference(first, second) or "")
    assert "adapter" not in plain.as_dict()

    save_drafter(tiny.random_drafter(targets[0]), tmp_path / "drafter")
    caplog.clear()
    moaspec.load_drafter(tmp_path / "drafter", target=targets[0])
    assert not caplog.messages
    for other in (None, 1):
        caplog.clear()
        drafter = moaspec.load_drafter(tmp_path / "drafter", target=targets[other])
        (said,) = caplog.messages
        assert "the text is the same" in said
        assert text(targets[other], drafter=drafter) == text(targets[other])


def test_a_drafter_is_adapted(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`initial=` makes a drafter of the base model one of the adapted model."""
    plain = moaspec.load_target(base, packed=False)
    save_drafter(tiny.random_drafter(plain), tmp_path / "drafter")
    save_adapter(plain, tmp_path / "adapter")
    target = moaspec.load_target(base, packed=False, adapter=tmp_path / "adapter")
    initial = str(tmp_path / "drafter")
    config = TrainConfig(target="tiny", data=("unused",), output="unused", initial=initial)
    drafter = load_initial_drafter(target, config, [])
    save_drafter(drafter, tmp_path / "adapted")
    caplog.clear()
    moaspec.load_drafter(tmp_path / "adapted", target=target)
    assert not caplog.messages


def test_hash_is_of_what_changes_the_weights(base: Path, tmp_path: Path) -> None:
    place = tmp_path / "adapter"
    save_adapter(moaspec.load_target(base, packed=False), place)
    before = adapter_hash(place)
    config = json.loads((place / CONFIG).read_text())
    (place / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": "elsewhere"}))
    assert adapter_hash(place) == before
    (place / CONFIG).write_text(json.dumps({**config, "lora_alpha": 9}))
    assert adapter_hash(place) != before


def test_an_adapter_of_another_base_is_told(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the names' last parts: a model may lie elsewhere than when the adapter was trained."""
    place = tmp_path / "adapter"
    save_adapter(moaspec.load_target(base, packed=False), place)
    config = json.loads((place / CONFIG).read_text())
    for made_for, told in (("owner/Base/", False), (None, False), ("owner/base-instruct", True)):
        (place / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": made_for}))
        caplog.clear()
        moaspec.load_target(base, packed=False, adapter=place)
        assert bool(caplog.messages) == told, made_for
    (said,) = caplog.messages
    assert "made for owner/base-instruct" in said
    assert f"merged into {base}" in said


def test_what_cannot_be_merged_is_refused(base: Path, tmp_path: Path) -> None:
    place = tmp_path / "adapter"
    save_adapter(moaspec.load_target(base, packed=False), place)

    def refused(match: str, model: Path = base) -> None:
        with pytest.raises(InputError, match=match):
            moaspec.load_target(model, adapter=place, packed=False)

    other = tmp_path / "other"
    tiny.fresh_target(num_hidden_layers=2).model.save_pretrained(other)
    refused("does not fit|cannot be merged", other)
    tensors = load_file(place / WEIGHTS)
    name = next(iter(tensors))
    save_file({key: one for key, one in tensors.items() if key != name}, place / WEIGHTS)
    refused("1 are missing")
    save_file({**tensors, name: tensors[name] * torch.nan}, place / WEIGHTS)
    refused("cannot be merged")
    config = json.loads((place / CONFIG).read_text())
    (place / CONFIG).write_text(json.dumps({**config, "peft_type": "PREFIX_TUNING"}))
    refused("only LORA")
    (place / CONFIG).write_text("[")
    refused("cannot be read")
    (place / WEIGHTS).unlink()
    refused(WEIGHTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": [HEAD]},
        {"target_modules": ["q_proj", f"model.{EMBEDDING}"]},
        {"target_modules": f".*({EMBEDDING}|q_proj)"},
        {"modules_to_save": [f"model.{EMBEDDING}"]},
    ],
    ids=str,
)
def test_tied_matrices_are_not_changed(changes: dict[str, Any], tmp_path: Path) -> None:
    """The head and the embedding would part."""
    model = tmp_path / "tied"
    tiny.fresh_target(tie_word_embeddings=True).model.save_pretrained(model)
    save_adapter(moaspec.load_target(model, packed=False), tmp_path / "adapter", **changes)
    with pytest.raises(InputError, match="one matrix"):
        moaspec.load_target(model, adapter=tmp_path / "adapter", packed=False)


def test_repeated_layers_are_refused(base: Path, tmp_path: Path) -> None:
    """They would be left out of the text."""
    place = tmp_path / "adapter"
    save_adapter(moaspec.load_target(base, packed=False), place)
    config = json.loads((place / CONFIG).read_text())
    (place / CONFIG).write_text(json.dumps({**config, "layer_replication": [[0, 2], [1, 3]]}))
    with pytest.raises(InputError, match="repeats layers"):
        moaspec.load_target(base, adapter=place, packed=False)


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": "(a+)+$"},
        {"target_modules": "(a|a)*b"},
        {"target_modules": ".*.*.*.*.*.*q_proj"},
        {"target_modules": "(?:(?:a{1,9}){1,9}){1,9}b"},
        {"target_modules": "("},
        {"target_modules": "(" * 5000},
        {"exclude_modules": "(a*)*"},
        {"rank_pattern": {"(a+)+": 4}},
        {"alpha_pattern": {"(a+)+": 4}},
        {"init_lora_weights": "pissa_niter_1000000"},
        {"init_lora_weights": "pissa_niter_" + "9" * 5000},
        {"r": 10**9},
        {"r": -1},
        {"r": "x"},
        {"rank_pattern": {"q_proj": 10**9}},
    ],
)
def test_configs_that_take_long_are_refused(
    change: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    save_adapter(tiny.fresh_target(), adapter)
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(InputError, match="cannot be used") as caught:
        moaspec.load_target(base, adapter=adapter)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("content", ["[" * 100_000, '{"peft_type": ' + "9" * 5000 + "}", "[]", ""])
def test_configs_that_are_none(content: str, tmp_path: Path) -> None:
    save_adapter(tiny.fresh_target(), tmp_path)
    (tmp_path / CONFIG).write_text(content)
    with pytest.raises(InputError, match="cannot be read"):
        adapter_hash(tmp_path)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q_proj|v_proj)",
        r"model\.layers\.\d+\.self_attn\.(q|k)_proj",
        "^(?!.*up).*_proj$",
        # As unsloth writes them.
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
    ],
)
def test_usual_patterns(pattern: str, base: Path, tmp_path: Path) -> None:
    save_adapter(tiny.fresh_target(), tmp_path / "adapter", target_modules=pattern)
    assert moaspec.load_target(base, adapter=tmp_path / "adapter", dtype="float32").adapter
