"""The logits of all tokens never exist at once: what is alive does not grow with the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from moaspec_train.dataset.examples import Example
from moaspec_train.run_config import TrainConfig
from moaspec_train.students.drafter_sizes import DrafterSizes
from moaspec_train.students.losses import (
    MAX_CHUNK,
    MAX_CPU_LOGITS,
    Divergence,
    ExitStates,
    LossWeights,
    exit_loss,
    logit_chunk_size,
)
from moaspec_train.trainer import Trainer


class LargestLogits(TorchDispatchMode):
    """Numbers in the largest tensor with an axis of the vocabulary's size and one of queries'."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self._vocab_size, self._hidden_size, self.found = vocab_size, hidden_size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                weight = self._hidden_size in tensor.shape  # embedding and head
                if tensor.shape[-1] == self._vocab_size and not weight:
                    self.found = max(self.found, tensor.numel())
        return result


@pytest.mark.parametrize("kind", ["forward_kl", "hybrid"])
def test_logits_in_memory_do_not_depend_on_length(
    kind: Divergence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step each on responses of 60 and of 240 tokens, at most 32 queries' logits at a time."""
    target, vocabulary = tiny.target(), 37  # a size that no other axis has
    monkeypatch.setattr("moaspec_train.students.losses.MAX_CPU_LOGITS", 1)
    largest = []
    for length in (60, 240):
        examples = [Example([5, 6, 7], [8 + i % 50 for i in range(length)])]
        config = TrainConfig(
            target="tiny",
            data=("unused",),
            output=str(tmp_path / str(length)),
            held_out=0,
            activation_cache=False,
            warm_start=False,
            loss=LossWeights(kl=1.0, divergence=kind),
            sizes=DrafterSizes(draft_vocab=vocabulary),
        )
        run = Trainer(target, examples, config)
        with LargestLogits(vocabulary, int(target.config.hidden_size)) as watched:
            run.train_step()
        largest.append(watched.found)
    assert largest == [32 * vocabulary] * 2


def test_a_pass_on_a_gpu_holds_one_chunk_of_logits() -> None:
    """Of 8,192 queries of Llama-3-8B, without computing anything."""
    vocabulary, hidden = 65_536, 4096
    chunk = logit_chunk_size(vocabulary, torch.device("cuda"))
    with FakeTensorMode(), LargestLogits(vocabulary, hidden) as watched:
        head = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
        drafted, target = torch.empty(2, 8192, hidden, dtype=torch.bfloat16)
        states = ExitStates(drafted.requires_grad_(), target, head.requires_grad_(False))
        proxy, _ = exit_loss(states, LossWeights(kl=1.0), scale=1.0, chunk=chunk)
        proxy.backward()
    assert watched.found == chunk * vocabulary == 2**27


def test_queries_at_once() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert logit_chunk_size(32768, gpu) == 4096
    assert logit_chunk_size(10**9, gpu) == MAX_CHUNK
    assert logit_chunk_size(256, cpu) == MAX_CHUNK
    assert logit_chunk_size(49152, cpu) == MAX_CPU_LOGITS // 49152
    assert logit_chunk_size(10**9, cpu) == 32
