"""EAGLE-3's head in the size of `lab/comparison/`: its training, and tau along known texts.

    python lab/eagle3.py train lab/comparison/eagle3.yaml data='[responses.jsonl]' steps=400
    python lab/eagle3.py tau --drafters runs/comparison/eagle3/head.pt smollm2-135m

The head reads the target's states before an early, a middle and a late layer. It is trained on its
own states, as it drafts: at step k of a block it reads its output of step k - 1. Embeddings and LM
head are the target's, frozen, as in all drafters here; EAGLE-3 trains an LM head of its own.

Source: arXiv 2503.01840. Legend: B batch, T tokens, W tokens of one step, E hidden size, G = 3 E.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moaspec_train.trainer as trainer_module
from moaspec import Target, load_target
from moaspec.drafting.other_proposers.baseline_proposers import EagleProposer, _EagleRound
from moaspec.drafting.tree_proposer import DraftRound, DraftSlots
from moaspec.model.baselines import EagleDrafter, StackConfig
from moaspec.model.layers import (
    CosSin,
    DecoderLayer,
    SelfAttend,
    masked_attention,
    merge_heads,
)
from moaspec.model.moa import positions
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import (
    Features,
    RequestText,
    Verifier,
    VerifyRequest,
    VerifyResult,
)
from moaspec_train.data_order import Blocks, TrainBatch
from moaspec_train.dataset.examples import Batch, Example, frequent_tokens
from moaspec_train.dataset.read_examples import read_examples
from moaspec_train.run_config import TrainConfig, read_train_config
from moaspec_train.students.losses import ExitStates
from moaspec_train.students.students import BaselineStudent, StudentOutput, unfilled_drafter
from moaspec_train.students.target_activations import ExampleStore, TargetActivations, fingerprint
from moaspec_train.students.warm_start import random_weights
from moaspec_train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import known_texts


def layers_before(num_layers: int) -> tuple[int, int, int]:
    """How many layers follow each of the three states."""
    return num_layers - 2, num_layers - num_layers // 2, 3


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention reads embeddings beside states, both normed."""

    def __init__(self, config: Any, *, eps: float, hidden_act: str) -> None:
        super().__init__(config, eps=eps, hidden_act=hidden_act)
        self.embedding_norm = nn.RMSNorm(config.hidden_size, eps=eps)
        for owner, name in (
            (self.self_attn, "q_proj"),
            (self.key_value, "k_proj"),
            (self.key_value, "v_proj"),
        ):
            rows = getattr(owner, name).out_features
            setattr(owner, name, nn.Linear(2 * config.hidden_size, rows, bias=False))

    def pair(self, embeddings_BTE: Tensor, states_BTE: Tensor) -> Tensor:
        """The attention's input, (B, T, 2 E)."""
        parts = self.embedding_norm(embeddings_BTE), self.input_layernorm(states_BTE)
        return torch.cat(parts, dim=-1)

    def read(
        self, embeddings_BTE: Tensor, states_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend
    ) -> Tensor:
        """The layer's output, (B, T, E)."""
        pair_BTP = self.pair(embeddings_BTE, states_BTE)
        query = self.self_attn.query(pair_BTP, cos_sin)
        found = attend(query, *self.key_value(pair_BTP, cos_sin))
        return self.finish(states_BTE, merge_heads(found))


class Eagle3Head(EagleDrafter):
    """Fuses three states, then drafts from its own; the output goes through `norm` to the head."""

    def __init__(self, config: StackConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_token_ids)
        width, eps = config.layer.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.layer: Any = Eagle3Layer(config.layer, eps=eps, hidden_act=config.hidden_act)
        self.norm = nn.RMSNorm(width, eps=eps)

    def fuse(self, states_G: Tensor) -> Tensor:
        """One state of three, (..., G) -> (..., E).

        Each is normed first, because some of their dimensions are large.
        """
        parts = states_G.unflatten(-1, (3, -1))
        return self.fc(F.rms_norm(parts, parts.shape[-1:], eps=self.norm.eps).flatten(-2))

    def read(
        self,
        embeddings_BTE: Tensor,
        hidden_BTE: Tensor,
        position_ids_BT: Tensor,
        attend: SelfAttend,
    ) -> Tensor:
        """States of the next drafts, (B, T, E), from fused states or earlier outputs."""
        return self.layer.read(embeddings_BTE, hidden_BTE, self.rope(position_ids_BT), attend)

    def forward(  # type: ignore[override]
        self, embeddings_BTE: Tensor, states_BTG: Tensor, batch: Batch, blocks: Blocks
    ) -> Tensor:
        """States for the LM head of every token of a response, (B, T, E); 0 elsewhere."""
        B, T, E = embeddings_BTE.shape
        before_BTE = F.pad(self.fuse(states_BTG)[:, :-1], (0, 0, 1, 0))
        position_BT = (positions(batch.attention_mask_BT) - 1).clamp(min=0)
        index_T = torch.arange(T, device=embeddings_BTE.device)
        real_BT = batch.attention_mask_BT.bool() & (index_T > 0)
        pair_BTP = self.layer.pair(embeddings_BTE, before_BTE)
        key, value = self.layer.key_value(pair_BTP, self.rope(position_BT))
        keys, values = [key], [value]
        # Of keys that drafts add: their tokens and s(i), both T in pads.
        drafted: list[tuple[Tensor, Tensor]] = []
        outputs, places = [], []
        last_index_BW, last_BWE = torch.empty(0), torch.empty(0)
        chosen_BT = batch.response_BT
        for step in range(int(blocks.step_BT[chosen_BT].max()) + 1):
            here_BT = chosen_BT & (blocks.step_BT == step)
            width = int(here_BT.sum(1).max())
            index_BW = torch.where(here_BT, index_T, T).sort(1).values[:, :width].contiguous()
            at_BW = index_BW.clamp(max=T - 1)
            if step == 0:
                state_BWE = _take(before_BTE, at_BW)
            else:
                found_BW = torch.searchsorted(last_index_BW, index_BW - 1)
                state_BWE = _take(last_BWE, found_BW.clamp(max=last_BWE.shape[1] - 1))
            verified_BW = blocks.last_verified_BT.gather(1, at_BW)
            # A block's first token has a true state before it, so its pair is one of the text's.
            text_BWT = (index_T <= verified_BW[..., None] + 1) & real_BT[:, None]
            masks = [text_BWT]
            if step:
                drafted.append((index_BW, torch.where(index_BW < T, verified_BW, T)))
                masks += [
                    (verified_BW[..., None] == own[:, None]) & (index_BW[..., None] >= at[:, None])
                    for at, own in drafted
                ]
            mask = torch.cat(masks, -1)[:, None]

            def attend(
                query: Tensor, key: Tensor, value: Tensor, mask: Tensor = mask, step: int = step
            ) -> Tensor:
                if step:
                    keys.append(key)
                    values.append(value)
                return masked_attention(query, torch.cat(keys, 2), torch.cat(values, 2), mask)

            embedded_BWE = _take(embeddings_BTE, at_BW)
            last_BWE = self.read(embedded_BWE, state_BWE, position_BT.gather(1, at_BW), attend)
            last_index_BW = index_BW
            outputs.append(last_BWE.flatten(0, 1))
            rows_B1 = torch.arange(B, device=index_T.device)[:, None]
            places.append(torch.where(index_BW < T, rows_B1 * T + index_BW, B * T).flatten())
        whole = embeddings_BTE.new_zeros(B * T + 1, E)
        whole = whole.index_copy(0, torch.cat(places), torch.cat(outputs).to(whole.dtype))
        return self.norm(whole[:-1].view(B, T, E))


def _take(x_BTE: Tensor, index_BW: Tensor) -> Tensor:
    return x_BTE.gather(1, index_BW[..., None].expand(-1, -1, x_BTE.shape[-1]))


class Eagle3Student(BaselineStudent):
    """Its training pass over blocks; the target's states are kept on disk."""

    def __init__(
        self,
        target: Target,
        config: TrainConfig,
        examples: Sequence[Example],
        train_ids: Sequence[int],
    ) -> None:
        super().__init__(target, replace(config, activation_cache=False), examples, train_ids)
        before = layers_before(target.num_layers)
        self.activations = TargetActivations(target, examples, None, before)
        widths = {"hidden": target.identity.hidden_size}
        widths |= {f"before{n}": target.identity.hidden_size for n in before}
        directory = (
            Path(config.output) / "states" / fingerprint(examples, self.activations.of_target)
        )
        self.activations._store = ExampleStore(
            directory, examples, widths, target.device, without="fewer examples"
        )

    @property
    def simulates_chain(self) -> bool:
        return True

    def _make_module(self, counted: Sequence[Example]) -> Eagle3Head:
        size, stops = self._config.sizes.draft_vocab, self.target.stop_token_ids
        vocabulary = frequent_tokens(counted, size=size, always=stops)
        return new_head(self.target, self._config, vocabulary)

    def run(self, model: nn.Module, part: TrainBatch, step: int) -> StudentOutput:  # noqa: ARG002
        batch, blocks = part.batch, part.blocks
        found = {name: array.float() for name, array in self.activations._fetch(batch).items()}
        states = [found[f"before{n}"] for n in self.activations.before]
        embeddings_BTE = self.target.embed(batch.input_ids_BT).float()
        states_BTE = model(embeddings_BTE, torch.cat(states, -1), batch, blocks)
        at = blocks.loss_BT
        exits = ExitStates(states_BTE[at].float(), found["hidden"][at], self._head)
        return StudentOutput([exits])


def new_head(target: Target, config: TrainConfig, vocabulary: Tensor | None) -> Eagle3Head:
    """Random weights, but for the last norm, a tenth of the target's: first drafts are unsure."""
    torch.manual_seed(config.seed)
    stack: Any = unfilled_drafter(target, config, vocabulary)
    head = Eagle3Head(stack.config, vocabulary)
    random_weights(head)
    base: Any = target.model.base_model
    head.norm.weight.data.copy_(0.1 * base.norm.weight)
    return head.float().to(target.device)


class Eagle3Proposer(EagleProposer):
    """Its features are the three states of every verified token, (n, G)."""

    module: Eagle3Head

    def append_features(self, row: int, features: Features) -> None:
        super().append_features(row, self.module.fuse(features))

    def draft_round(self, rows: Sequence[RequestText], shape: Tree) -> DraftRound:
        return _Eagle3Round(self, rows, shape)


class _Eagle3Round(_EagleRound):
    proposer: Eagle3Proposer

    def finish(self, x_BWE: Tensor, position_BW: Tensor, slots: DraftSlots) -> Tensor:
        kept_BWE = super().finish(x_BWE, position_BW, slots)
        return self.proposer.module.norm(kept_BWE)


class KnownStates(Verifier):
    """A verifier inside `KnownText` which returns the states of known texts.

    Args:
        texts: prompts and answers; no prompt is the beginning of another text.
    """

    def __init__(self, target: Target, texts: Sequence[tuple[list[int], list[int]]]) -> None:
        self._target = target
        self._texts = [prompt + answer for prompt, answer in texts]
        self._rows: dict[int, Tensor] = {}

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """The states of each request's new tokens."""
        results = []
        for request in requests:
            start, stop = request.num_verified, request.num_verified + len(request.new_tokens)
            if not start:
                known = list(request.new_tokens)
                text = next(one for one in self._texts if one[: len(known)] == known)
                self._rows[request.cache_row] = captured(self._target, text)
            results.append(VerifyResult((), 0, self._rows[request.cache_row][start:stop]))
        return results

    def close(self, row: int) -> None:
        """Forget the states of a row."""
        self._rows.pop(row, None)


def captured(target: Target, token_ids: Sequence[int]) -> Tensor:
    """The three states of every token, (T, G) float32."""
    ids = torch.tensor([list(token_ids)], device=target.device)
    before = layers_before(target.num_layers)
    found = target.capture(ids, torch.ones_like(ids), before).before
    return torch.cat([found[n][0].float() for n in before], -1)


def new_trainer(args: argparse.Namespace) -> Trainer:
    """The trainer of a config and its overrides."""
    config = read_train_config(args.config, args.overrides)
    if config.threads:
        torch.set_num_threads(config.threads)
    target = load_target(config.target, dtype=config.target_dtype, packed=False)
    examples = read_examples(
        config.data, vocab_size=target.vocab_size, max_length=config.max_length
    )
    trainer = Trainer(target, examples, config)
    size = sum(one.numel() for one in trainer.student.module.parameters())
    print(f"{size:,} parameters", flush=True)
    return trainer


def train_and_print(trainer: Trainer, save: Callable[[], None] = lambda: None) -> None:
    """Train to the end; call `save` and print held-out figures where the config says."""
    while trainer.step < trainer.config.steps:
        parts = trainer.train_step()
        loss, hits = parts.total / parts.count, parts.hits / parts.count
        print(f"step {trainer.step}: loss {loss:.5f}, {hits:.0%} right", flush=True)
        if trainer.step % trainer.config.save_every == 0 or trainer.step == trainer.config.steps:
            save()
            for found in trainer.measure().values():
                print(f"held out: {found.accuracy}, simulated tau {found.tau}", flush=True)


def train(args: argparse.Namespace) -> None:
    """Train the head, and write its weights."""
    setattr(trainer_module, "BaselineStudent", Eagle3Student)  # noqa: B010 - no public hook
    trainer = new_trainer(args)
    module = trainer.student.module

    def save() -> None:
        weights = {name: part.bfloat16() for name, part in module.state_dict().items()}
        torch.save(
            {"weights": weights, "ids": module.draft_token_ids, "config": module.config},
            trainer.output / "head.pt",
        )

    train_and_print(trainer, save)


def load_head(path: Path) -> Eagle3Head:
    """The head that `train` wrote, in float32."""
    saved: Mapping[str, Any] = torch.load(path, weights_only=False)
    head = Eagle3Head(saved["config"], saved["ids"]).float()
    head.load_state_dict(saved["weights"])
    return head.eval().requires_grad_(requires_grad=False)


def load_parts(target: Target, name: str) -> known_texts.Parts:
    """Verifier and proposer of a head that `train` wrote, in float32, or of another drafter."""
    if not name.endswith(".pt"):
        return known_texts.local(target, name)
    device = str(target.device)
    exact = load_target(target.name, dtype="float32", device=device, packed=False)
    head = load_head(Path(name)).to(device)
    return lambda texts: (KnownStates(exact, texts), Eagle3Proposer(head, exact))


def main() -> None:
    """Run one of the two commands."""
    if sys.argv[1:2] == ["tau"]:
        options = known_texts.text_options("tau of heads (.pt) and other drafters.")
        known_texts.measure(options.parse_args(sys.argv[2:]), load_parts)
        return
    options = argparse.ArgumentParser(description="Train EAGLE-3's head; `tau` measures it.")
    options.add_argument("command", choices=["train", "tau"])
    options.add_argument("config", type=Path)
    options.add_argument("overrides", nargs="*")
    train(options.parse_args())


if __name__ == "__main__":
    main()
