"""Let a Llama-like target write many texts at once, on a GPU: training data for long runs.

Rows of one batch are at different places of different texts. A finished row gets the next text. On
CUDA the step of all rows is one graph for each cache length. Texts are the target's own up to
rounding: the drafter learns from the target's distributions, which training computes anew.

Legend: B rows, T slots, L layers, H heads, J KV heads, G = H / J, D head dim, E hidden size, V
vocabulary, N rows of a group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CHECK_EVERY = 16
"""Steps between looks at which rows are finished."""
LENGTH_UNIT = 128
"""Cache lengths that graphs are recorded for are its multiples."""


@dataclass
class Job:
    """One text to write.

    Attributes:
        prompt: token ids.
        temperature: 0 for greedy.
        max_new_tokens: of the response.
        tag: what the caller wants to remember.
        response: filled when done, with the stop token if it came.
    """

    prompt: list[int]
    temperature: float
    max_new_tokens: int
    tag: Any = None
    response: list[int] = field(default_factory=list)


class BatchWriter:
    """Writes texts with a frozen Llama model of transformers.

    Args:
        model: `LlamaForCausalLM` in the dtype to compute in.
        rows: B.
        length: T, longest text in tokens.
        stops: ids that end a response.
        seed: of the sampling.
    """

    def __init__(self, model: Any, rows: int, length: int, stops: set[int], seed: int) -> None:
        config = model.config
        self.J, self.H = config.num_key_value_heads, config.num_attention_heads
        self.D = getattr(config, "head_dim", None) or config.hidden_size // self.H
        self.G, self.eps, self.B, self.T = self.H // self.J, config.rms_norm_eps, rows, length
        self.device, self.dtype = model.device, model.dtype
        self.stops, base = stops, model.model
        self.embedding, self.head, self.norm = (
            base.embed_tokens.weight,
            model.lm_head.weight,
            base.norm.weight,
        )
        self.layers = [_weights(layer) for layer in base.layers]
        shape = (len(self.layers), rows, self.J, length, self.D)
        self.key, self.value = (
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in "kv"
        )
        angles = (
            torch.arange(length, device=self.device).float()[:, None] * base.rotary_emb.inv_freq
        )
        self.cos, self.sin = (
            f(torch.cat((angles, angles), -1)).to(self.dtype) for f in (torch.cos, torch.sin)
        )
        self.tokens, self.position, self.limit = (
            torch.zeros(rows, dtype=torch.long, device=self.device) for _ in "tpl"
        )
        self.limit -= 1
        self.temperature = torch.ones(rows, device=self.device)
        self.text = torch.zeros(rows, length + 1, dtype=torch.long, device=self.device)
        self.stop_ids = torch.tensor(sorted(stops), device=self.device)
        self.all_rows = torch.arange(rows, device=self.device)
        self.graphs: dict[int, Any] = {}
        self.attend = _products
        if self.device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()  # graphs run one after another
            self.attend = min((_fused, _products), key=self._attention_s)
        torch.manual_seed(seed)

    @torch.inference_mode()
    def write(self, next_job: Callable[[], Job | None], *, seconds: float = 1e9) -> Iterator[Job]:
        """Yield texts as they are finished.

        Args:
            next_job: gives the next text, or None for no more.
            seconds: after these no text is begun, and unfinished ones are dropped.
        """
        jobs: list[Job | None] = [None] * self.B
        started = time.time()
        while True:
            free = [row for row in range(self.B) if jobs[row] is None]
            if time.time() - started > seconds:
                return
            begun: list[tuple[int, Job]] = []
            for row in free:
                job = next_job()
                if job is None:
                    break
                begun.append((row, job))
                jobs[row] = job
            self._begin(begun)
            if not any(job is not None for job in jobs):
                return
            longest = int(self.position.max()) + CHECK_EVERY + 1
            for _ in range(CHECK_EVERY):
                self._step(min(self.T, -(-longest // LENGTH_UNIT) * LENGTH_UNIT))
            done = (self.position >= self.limit).tolist()
            ended = [row for row in range(self.B) if jobs[row] is not None and done[row]]
            if ended:
                texts, ends = self.text[ended].tolist(), self.position[ended].tolist()
                for row, text, end in zip(ended, texts, ends, strict=True):
                    job = jobs[row]
                    assert job is not None
                    jobs[row] = None
                    job.response = text[len(job.prompt) : end + 1]
                    yield job

    def _begin(self, begun: list[tuple[int, Job]]) -> None:
        """Run the prompts, at most some 65,000 tokens at once, and draw each one's first token."""
        begun = sorted(begun, key=lambda one: len(one[1].prompt))
        while begun:
            longest = len(begun[-1][1].prompt)
            size = min(len(begun), max(1, 65_536 // longest))
            group, begun = begun[-size:], begun[:-size]
            rows = torch.tensor([row for row, _ in group], device=self.device)
            lengths = torch.tensor([len(job.prompt) for _, job in group], device=self.device)
            ids = torch.zeros(size, longest, dtype=torch.long)
            for i, (_, job) in enumerate(group):
                ids[i, : len(job.prompt)] = torch.tensor(job.prompt)
            ids = ids.to(self.device)
            self.text[rows, :longest] = ids
            self.temperature[rows] = torch.tensor(
                [job.temperature for _, job in group], device=self.device
            )
            news = torch.tensor([job.max_new_tokens for _, job in group], device=self.device)
            self.limit[rows] = torch.minimum(lengths + news, torch.full_like(news, self.T)) - 1
            last = self._prompts(ids, lengths, rows)
            self._draw(last, rows, lengths, torch.ones_like(rows).bool())

    def _prompts(self, ids_NT: Tensor, lengths_N: Tensor, rows: Tensor) -> Tensor:
        """Fill the cache with right-padded prompts; the states of their last tokens, (N, E)."""
        size, longest = ids_NT.shape
        cos, sin = self.cos[:longest], self.sin[:longest]
        x = F.embedding(ids_NT, self.embedding)
        for index, w in enumerate(self.layers):
            q, k, v = self._heads(x, w)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            self.key[index, rows, :, :longest], self.value[index, rows, :, :longest] = k, v
            k, v = (a.repeat_interleave(self.G, 1) for a in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = self._finish(x, out.transpose(1, 2).flatten(2), w)
        return x[torch.arange(size, device=self.device), lengths_N - 1]

    def _step(self, slots: int) -> None:
        """One more token for every row, attending to the first `slots` slots."""
        if self.device.type != "cuda":
            self._advance(slots)
            return
        if slots not in self.graphs:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            state = (self.tokens, self.position, self.text, self.limit)
            with torch.cuda.stream(stream):  # libraries prepare themselves; no text changes
                kept = [a.clone() for a in state]
                for _ in range(2):
                    self._advance(slots)
                for a, b in zip(state, kept, strict=True):
                    a.copy_(b)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                self._advance(slots)
            self.graphs[slots] = graph
        self.graphs[slots].replay()

    def _advance(self, slots: int) -> None:
        position = self.position.clamp(max=self.T - 1)
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        seen = torch.arange(slots, device=self.device) <= position[:, None]
        bias = torch.zeros(self.B, 1, self.G, slots, dtype=self.dtype, device=self.device)
        bias.masked_fill_(~seen[:, None, None], -torch.inf)
        bias = bias.expand(self.B, self.J, self.G, slots)
        x = F.embedding(self.tokens, self.embedding)
        for index, w in enumerate(self.layers):
            q, k, v = (a[:, :, 0] for a in self._heads(x[:, None], w))
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            key, value = self.key[index], self.value[index]
            key[self.all_rows, :, position], value[self.all_rows, :, position] = k, v
            q = q.unflatten(1, (self.J, self.G))
            out = self.attend(q, key[:, :, :slots], value[:, :, :slots], bias)
            x = self._finish(x, out.flatten(1), w)
        self._draw(x, self.all_rows, position + 1, self.position < self.limit)

    def _draw(self, states_NE: Tensor, rows: Tensor, place_N: Tensor, open_N: Tensor) -> None:
        """Sample each row's next token and write it at `place_N`; others stay as they are."""
        logits = F.linear(
            F.rms_norm(states_NE, (states_NE.shape[-1],), self.norm, self.eps), self.head
        ).float()
        temperature = self.temperature[rows][:, None]
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        drawn = (logits - temperature * noise).argmax(-1)
        stopped = (drawn[:, None] == self.stop_ids).any(-1)
        self.text[rows, torch.where(open_N, place_N, self.T)] = drawn  # the last column is a bin
        self.position[rows] = torch.where(open_N, place_N, self.position[rows])
        self.tokens[rows] = torch.where(open_N, drawn, self.tokens[rows])
        self.limit[rows] = torch.where(open_N & stopped, self.position[rows], self.limit[rows])

    @torch.inference_mode()
    def _attention_s(self, attend: Any) -> float:
        """Seconds of one layer's attention of all rows."""
        q = torch.randn(self.B, self.J, self.G, self.D, dtype=self.dtype, device=self.device)
        bias = q.new_zeros(self.B, 1, self.G, self.T // LENGTH_UNIT * LENGTH_UNIT).expand(
            -1, self.J, -1, -1
        )
        k, v = (a[0][:, :, : bias.shape[-1]] for a in (self.key, self.value))
        for _ in range(3):
            attend(q, k, v, bias)
        torch.cuda.synchronize()
        started = time.time()
        for _ in range(10):
            attend(q, k, v, bias)
        torch.cuda.synchronize()
        print(f"{attend.__name__}: {(time.time() - started) * 100:.3f} ms", flush=True)
        return time.time() - started

    def _heads(self, x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Queries, keys and values, (N, heads, T, D) each."""
        normed = F.rms_norm(x, (x.shape[-1],), w["norm1"], self.eps)
        sizes = (self.H * self.D, self.J * self.D, self.J * self.D)
        return tuple(
            part.unflatten(-1, (-1, self.D)).transpose(1, 2)
            for part in F.linear(normed, w["qkv"]).split(sizes, -1)
        )

    def _finish(self, x: Tensor, attention: Tensor, w: dict[str, Tensor]) -> Tensor:
        x = x + F.linear(attention, w["o"])
        normed = F.rms_norm(x, (x.shape[-1],), w["norm2"], self.eps)
        gate, up = F.linear(normed, w["gate_up"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, w["down"])


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(2, 3)) + bias
    return torch.matmul(scores.softmax(-1), v)


def _weights(layer: Any) -> dict[str, Tensor]:
    a, m = layer.self_attn, layer.mlp
    return {
        "norm1": layer.input_layernorm.weight,
        "norm2": layer.post_attention_layernorm.weight,
        "qkv": torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)),
        "o": a.o_proj.weight,
        "gate_up": torch.cat((m.gate_proj.weight, m.up_proj.weight)),
        "down": m.down_proj.weight,
    }


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
