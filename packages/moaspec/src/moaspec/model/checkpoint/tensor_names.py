"""Names of a drafter's tensors: published ones on disk, module paths in memory."""

from moaspec_core.errors import CorruptCheckpointError

DRAFT_TOKENS = "draft_token_ids"
HEAD_MOMENT = "head_moment"
BESIDE_WEIGHTS = (DRAFT_TOKENS, HEAD_MOMENT)
PROJECTION = "Ekv2E.weight"  # every Mixture-of-Attentions drafter has it, and no other model

PUBLISHED = (
    # (published prefix, module path); the first that matches wins.
    ("layer_self_attention.self_attn.k_proj.", "encoder.layer_self_attention.key_value.k_proj."),
    ("layer_self_attention.self_attn.v_proj.", "encoder.layer_self_attention.key_value.v_proj."),
    ("layer_self_attention.", "encoder.layer_self_attention."),
    ("self_attention.self_attn.k_proj.", "decoder.self_attention.key_value.k_proj."),
    ("self_attention.self_attn.v_proj.", "decoder.self_attention.key_value.v_proj."),
    ("self_attention.", "decoder.self_attention."),
    ("cross_attention.self_attn.k_proj.", "encoder.memory_key_value.k_proj."),
    ("cross_attention.self_attn.v_proj.", "encoder.memory_key_value.v_proj."),
    ("cross_attention.", "decoder.cross_attention."),
    ("Ekv2E.", "encoder.projection."),
)
RENAMED = (
    *PUBLISHED,
    # Parts that no published drafter has.
    ("further_self_attention.", "decoder.further_self_attention."),
    ("exits.", "exits."),
)
SHARED_NORM = "encoder.memory_norm."


def to_module_name(published: str) -> str:
    """Our module path of a published tensor name."""
    for prefix, path in RENAMED:
        if published.startswith(prefix):
            return path + published.removeprefix(prefix)
    raise CorruptCheckpointError(f"Unexpected tensor {published!r} in the checkpoint.")


def to_published_name(module_name: str) -> str:
    """Published tensor name of one of our parameters."""
    for prefix, path in RENAMED:
        if module_name.startswith(path):
            return prefix + module_name.removeprefix(path)
    raise AssertionError(module_name)
