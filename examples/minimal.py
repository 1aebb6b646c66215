"""Speculative decoding with a Mixture-of-Attentions drafter, in one loop and plain PyTorch.

The target is transformers' own model. The drafter is `moaspec.model`. Nothing else of moaspec takes
part: no engine, no kernels, no trees. `docs/concepts.md` explains the terms.

    python examples/minimal.py "Why is the sky blue?"

Legend: B batch (1), T tokens, L target layers, H KV heads, D head dim, E hidden size,
K = 2 * H * D, V vocabulary.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import moaspec
from moaspec.model import MoADrafter

DRAFT_LENGTH = 4


@dataclass
class KeyValues:
    """Keys and values of one attention layer, (1, H, T, D) each."""

    key: Tensor | None = None
    value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> None:
        self.key = key if self.key is None else torch.cat((self.key, key), dim=2)
        self.value = value if self.value is None else torch.cat((self.value, value), dim=2)

    def crop(self, length: int) -> None:
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[:, :, :length], self.value[:, :, :length]

    def self_attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append the keys and values of the text's last tokens, and attend with their queries."""
        self.append(key, value)
        return self.attend(query, causal=True)

    def attend(self, query: Tensor, *, causal: bool) -> Tensor:
        """Attention of the text's last tokens; causal, or over all keys."""
        assert self.key is not None
        assert self.value is not None
        num_queries, num_keys = query.shape[2], self.key.shape[2]
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool)
        if causal:
            mask = mask.tril(num_keys - num_queries)
        return F.scaled_dot_product_attention(
            query, self.key, self.value, attn_mask=mask, enable_gqa=True
        )


@dataclass
class DraftCache:
    """What the drafter keeps of a text.

    Attributes:
        text: keys and values of SA's layers, of every token of the text.
        memory: CA's keys and values, of every token that the target has processed.
    """

    text: list[KeyValues]
    memory: KeyValues = field(default_factory=KeyValues)


def encode(drafter: MoADrafter, target_cache: DynamicCache, start: int, memory: KeyValues) -> None:
    """Append to CA's memory what LSA makes of the target's keys and values from `start` on."""
    layers = [torch.stack((layer.keys, layer.values), dim=3) for layer in target_cache.layers]
    kv_HTL2D = torch.stack([layer[0, :, start:] for layer in layers], dim=2)
    kv_BTLK = kv_HTL2D.permute(1, 2, 0, 3, 4).flatten(2)[None]
    positions_BT = torch.arange(start, start + kv_BTLK.shape[1])[None]
    memory.append(*drafter.project_kv(drafter.aggregate(kv_BTLK), positions_BT))


def draft(
    drafter: MoADrafter, target: PreTrainedModel, text: list[int], cache: DraftCache
) -> list[int]:
    """A chain of tokens that may follow the text. SA reads tokens; CA reads the memory."""
    decoder = drafter.decoder
    drafts: list[int] = []
    first = cache.text[0].key
    unread = text[0 if first is None else first.shape[2] :]
    for _ in range(DRAFT_LENGTH):
        stop = len(text) + len(drafts)
        positions_BT = torch.arange(stop - len(unread), stop)[None]

        x_BTE = target.get_input_embeddings()(torch.tensor([unread]))
        x_BTE = decoder.run_self_attention(
            x_BTE, decoder.self_rope(positions_BT), [layer.self_attend for layer in cache.text]
        )
        states_BTE = decoder.run_cross_attention(
            x_BTE[:, -1:],
            decoder.cross_rope(positions_BT[:, -1:]),
            lambda query: cache.memory.attend(query, causal=False),
        )
        states_BTE = drafter.adapt(states_BTE, 0)  # N = 0: for the target's LM head
        logits_V = target.get_output_embeddings()(states_BTE)[0, -1]
        if drafter.draft_token_ids is not None:  # the drafter knows only these tokens
            logits_V = logits_V[drafter.draft_token_ids]
        best = logits_V.argmax()
        token = best if drafter.draft_token_ids is None else drafter.draft_token_ids[best]
        drafts.append(int(token))
        unread = drafts[-1:]
    return drafts


@torch.inference_mode()
def generate(
    target: PreTrainedModel, drafter: MoADrafter, prompt_ids: list[int], max_new_tokens: int
) -> tuple[list[int], int]:
    """Greedy speculative decoding.

    Returns:
        The generated ids, which are those that the target alone generates, and how many target
        passes they took.
    """
    target_cache = DynamicCache()
    draft_cache = DraftCache([KeyValues() for _ in drafter.decoder.text_layers])
    logits = target(torch.tensor([prompt_ids]), past_key_values=target_cache).logits[0]
    text, num_passes = [*prompt_ids, int(logits[-1].argmax())], 1
    encode(drafter, target_cache, 0, draft_cache.memory)
    stops = set(torch.tensor(target.generation_config.eos_token_id).flatten().tolist())
    while len(text) < len(prompt_ids) + max_new_tokens and text[-1] not in stops:
        num_verified = len(text) - 1  # the target has processed all tokens but the newest
        drafts = draft(drafter, target, text, draft_cache)
        # One pass over the newest token and its drafts: what the target itself chooses after each.
        new_ids = torch.tensor([[text[-1], *drafts]])
        logits = target(new_ids, past_key_values=target_cache).logits[0]
        num_passes += 1
        for drafted, chosen in zip([*drafts, None], logits.argmax(-1).tolist(), strict=True):
            text.append(chosen)
            if chosen != drafted or chosen in stops:
                break
        # Drop the keys and values of rejected drafts; encode those of accepted ones.
        num_rejected = num_verified + 1 + len(drafts) - (len(text) - 1)
        if num_rejected:
            target_cache.crop(-num_rejected)
        for layer in draft_cache.text:
            layer.crop(len(text) - 1)
        encode(drafter, target_cache, num_verified, draft_cache.memory)
    return text[len(prompt_ids) :][:max_new_tokens], num_passes


def main() -> None:
    """Answer a question, and compare the ids with those of moaspec's engine."""
    question = " ".join(sys.argv[1:]) or "Why is the sky blue?"
    # packed=False: transformers' own layers, not moaspec's kernels.
    loaded = moaspec.load_target("smollm2-135m", dtype="float32", packed=False)
    drafter = moaspec.load_drafter("smollm2-135m", target=loaded)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    messages = [{"role": "user", "content": question}]
    prompt_ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    ids, num_passes = generate(loaded.model, drafter, prompt_ids, max_new_tokens=64)
    print(tokenizer.decode(ids, skip_special_tokens=True))
    expected = moaspec.generate(loaded, prompt_ids, max_new_tokens=64).token_ids
    same = "the same" if ids == expected else "DIFFERENT"
    print(f"\n{len(ids)} tokens in {num_passes} target passes; the engine's ids are {same}.")


if __name__ == "__main__":
    main()
