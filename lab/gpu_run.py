"""The bundled drafter's twelfth run: on one GPU the target writes texts, then a drafter trains.

    python lab/gpu_run.py jobs PROMPTS.jsonl TARGET JOBS.jsonl
    python lab/gpu_run.py write JOBS.jsonl TARGET TEXTS.jsonl --seconds 45 7 4 --against EVAL_SETS
    python lab/gpu_run.py train lab/runs/smollm2-135m-twelfth.yaml key=value ... --seconds 81

`jobs` makes prompts for three stages: short ones with several system prompts, follow-ups and, half
of them, beginnings of prompts that the target goes on with; articles; several articles in a row.
`write` begins texts until a stage's seconds are over. `train` is `moaspec train` with a schedule by
the clock, shapes that repeat, batches prepared in a thread and a compiled LSA.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import queue
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from batch_writer import BatchWriter, Job
from torch import Tensor

from moaspec import Target, load_target
from moaspec.model.moa import TargetEncoder
from moaspec_core.chat.messages import words
from moaspec_train.data_order import TrainBatch
from moaspec_train.dataset.examples import map_tensors
from moaspec_train.dataset.read_examples import read_examples
from moaspec_train.run_config import TrainConfig, read_train_config
from moaspec_train.trainer import Trainer

STAGES = {"short": (2048, 768), "article": (512, 1408), "articles": (160, 4096)}
"""Rows of a batch and slots of a row."""
LONGEST_PROMPT = {"short": 300, "article": 1100, "articles": 3700}
NEW_TOKENS, OVERLAP_WORDS = 320, 8
CHUNK = 8192
"""Tokens whose layers LSA reads at once."""
WORDS = {
    "system": "You are a creative writer.|You answer in bullet points.|You are a pirate."
    "|You are a careful accountant. Show your calculation.|Reply in one short paragraph."
    "|You are a patient teacher who explains step by step.|You are a historian."
    "|You are a concise assistant. Answer in as few words as you can.",
    "begin": "|||Write |Write a |Explain |What |How |Give me |Create |Describe |Can you |List |Why "
    "|Imagine |Suppose |Compare |Design |Find |Calculate |Tell me |Who |Rewrite |Complete this "
    "function:\ndef |Write a program |¿Qué |Was ist |Écris |Scrivi ",
    "follow": "Can you give an example?|Make it shorter.|Explain that in simpler words.|Why is "
    "that so?|Now write it as a list.|Are you sure? Check it again.|Tell me more.|What are the "
    "disadvantages?|Now do the same in a more formal tone.|Write the code with comments.",
    "article": "Summarize: {}|Summarize the following article:\n\n{}|What is this text about?\n\n{}"
    "|{}\n\nSummarize the text above in three sentences.|{}\n\nTL;DR"
    "|Give me the key points of this article as a list:\n{}",
}


def write_jobs(args: argparse.Namespace) -> None:
    """Write one job a line: stage, prompt_ids, temperature, and what follows."""
    tokenizer: Any = load_target(args.target).tokenizer
    chooser = random.Random(0)  # noqa: S311 - no secrets
    choices = {name: text.split("|") for name, text in WORDS.items()}
    prompts = [json.loads(line)["prompt"] for line in args.prompts.open(encoding="utf-8")]
    articles = [
        part
        for prompt in prompts
        if len(part := max(re.split(r"\n\n|[Aa]rticle: ", prompt), key=len)) > 700
    ]

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def chat(text: str, *, opened: bool = False) -> list[int]:
        """A prompt with the default system prompt, another or none; `opened` to be gone on with."""
        drawn = chooser.random()
        if drawn < 0.15:
            whole = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        else:
            system = {"role": "system", "content": chooser.choice(choices["system"])}
            messages = [{"role": "user", "content": text}]
            messages = messages if drawn < 0.75 else [system, *messages]
            whole = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        return ids(whole[: whole.rindex("<|im_end|>")] if opened else whole)

    rows: list[dict[str, Any]] = []

    def add(prompt_ids: list[int], *, greedy: float, begun: bool = False) -> None:
        fits = [stage for stage, size in LONGEST_PROMPT.items() if len(prompt_ids) <= size]
        if not fits:
            return
        temperature = 0.0 if chooser.random() < greedy else chooser.choice((0.6, 0.8, 1.0))
        row = {"stage": fits[0], "prompt_ids": prompt_ids, "temperature": temperature}
        if chooser.random() < 0.15:
            text = chooser.choice(choices["follow"])
            turn = f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            row["follow_ids"] = ids(turn)
        rows.append(row | ({"begun": True} if begun else {}))

    for prompt in prompts:
        for greedy in (1.0, 0.15, 0.15):
            add(chat(prompt), greedy=greedy)
        text = chooser.choice(choices["begin"]).rstrip(" ")
        add(chat(text, opened=True), greedy=0.0, begun=True)
    for count in [1] * 3 * len(articles) + [2] * 1500 + [3, 4, 5, 6, 7, 8] * 150:
        body = "\n\n".join(chooser.sample(articles, count))
        add(chat(chooser.choice(choices["article"]).format(body)), greedy=0.5)
    chooser.shuffle(rows)
    args.jobs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_texts(args: argparse.Namespace) -> None:
    """Let the target write; `moaspec train` reads the file."""
    target = load_target(args.target, dtype="bfloat16", device=args.device, packed=False)
    forbidden = {gram for path in args.against or [] for gram in evaluation_ngrams(path)}
    rows = [json.loads(line) for line in args.jobs.open(encoding="utf-8")]
    with args.texts.open("w", encoding="utf-8") as file:
        for (stage, sizes), seconds in zip(STAGES.items(), args.seconds, strict=True):
            stage_rows = [row for row in rows if row["stage"] == stage]
            writer = BatchWriter(target.model, *sizes, stops=set(target.stop_token_ids), seed=1)
            started, tokens = time.perf_counter(), 0
            for job in stage_texts(writer, target, stage_rows, forbidden, seconds):
                tokens += len(job.response)
                row = {"prompt_ids": job.prompt, "response_ids": job.response}
                file.write(json.dumps(row) + "\n")
            spent = time.perf_counter() - started
            print(f"{stage}: {tokens} tokens in {spent:.0f} s", flush=True)
            del writer


def stage_texts(
    writer: BatchWriter,
    target: Target,
    rows: list[dict[str, Any]],
    forbidden: set[tuple[str, ...]],
    seconds: float,
) -> Iterable[Job]:
    """Finished conversations: prompts that were only begun get an answer, some a second turn."""
    tokenizer: Any = target.tokenizer
    answer = tokenizer("\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    waiting = deque(
        Job(row["prompt_ids"], row["temperature"], 80 if row.get("begun") else NEW_TOKENS, row)
        for row in rows
    )
    again: deque[Job] = deque()

    def next_job() -> Job | None:
        return again.popleft() if again else waiting.popleft() if waiting else None

    for job in writer.write(next_job, seconds=seconds):
        row, ended = job.tag, job.response[-1] in target.stop_token_ids
        if row.get("begun"):
            text = tokenizer.decode(job.prompt[-12:] + job.response, skip_special_tokens=True)
            if ended and len(job.response) > 3 and not ngrams(text) & forbidden:
                prompt = [*job.prompt, *job.response, *answer]
                later = {key: value for key, value in row.items() if key != "begun"}
                temperature = (0.0, 0.6, 0.0, 1.0)[len(prompt) % 4]
                again.append(Job(prompt, temperature, NEW_TOKENS, later))
            continue
        yield job
        if ended and "follow_ids" in row:
            prompt = [*job.prompt, *job.response, *row["follow_ids"]]
            if len(prompt) + NEW_TOKENS < writer.T:
                again.append(Job(prompt, job.temperature, NEW_TOKENS, {}))


def ngrams(text: str) -> set[tuple[str, ...]]:
    """Its sequences of eight words."""
    found = words(text)
    return {found[i : i + OVERLAP_WORDS] for i in range(len(found) - OVERLAP_WORDS + 1)}


def evaluation_ngrams(directory: Path) -> set[tuple[str, ...]]:
    """Those of the turns of evaluation sets."""
    lines = [
        line
        for path in directory.rglob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return {gram for line in lines for turn in json.loads(line)["turns"] for gram in ngrams(turn)}


def train(args: argparse.Namespace) -> None:
    """Train for `args.seconds`; the learning rate's decay ends with them."""
    config = read_train_config(args.config, args.overrides)
    target = load_target(config.target, dtype="bfloat16", device=config.device, packed=False)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new shape for tens of ms
    torch.set_float32_matmul_precision("high")
    examples = read_examples(
        config.data, vocab_size=target.vocab_size, max_length=config.max_length
    )
    trainer = Trainer(target, examples, config)
    compile_lsa(trainer.student.module.encoder)
    setattr(trainer.data, "next_batch", prefetched(trainer.data.next_batch))  # noqa: B010
    split = trainer._micro_batches
    trainer._micro_batches = lambda whole: [  # type: ignore[method-assign]
        rounded(part) for part in split(whole)
    ]
    started = time.perf_counter()
    while (done := (time.perf_counter() - started) / args.seconds) < 1:
        set_steps(config, max(trainer.step + 1, int(trainer.step / max(done, 1e-3))))
        parts = trainer.train_step()
        if trainer.step % 50 == 0:
            print(trainer.step, trainer.tokens, f"kl {parts.kl / parts.count:.3f}", flush=True)
    print(trainer._held_out())
    trainer.export()


def set_steps(config: TrainConfig, steps: int) -> None:
    """Expect the run to have so many steps; the first 30 are too few to tell."""
    object.__setattr__(config, "steps", max(steps, 31))


def compile_lsa(encoder: TargetEncoder) -> None:
    """Compute `mean_over_layers` with gradients by one compiled function, in chunks of one size."""
    plain, compiled = encoder.mean_over_layers, torch.compile(encoder.layer_mean, dynamic=False)

    def mean(kv_BTLK: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return plain(kv_BTLK)
        flat = kv_BTLK.flatten(0, 1)
        padded = F.pad(flat, (0, 0, 0, 0, 0, -len(flat) % CHUNK))
        means = [compiled(chunk.float()) for chunk in padded.split(CHUNK)]
        return torch.cat(means)[: len(flat)].unflatten(0, kv_BTLK.shape[:2])

    encoder.mean_over_layers = mean  # type: ignore[method-assign]


def rounded(part: TrainBatch) -> TrainBatch:
    """Pad to few different shapes; a row of pads has one token, as no row may be empty."""
    rows, tokens = part.batch.input_ids_BT.shape
    more = (0, -tokens % 64, 0, -rows % 16)
    padded: TrainBatch = map_tensors(part, lambda x: F.pad(x, more) if x.ndim == 2 else x)
    padded.batch.attention_mask_BT[rows:, 0] = 1
    return dataclasses.replace(padded)


def prefetched(make: Callable[[int], TrainBatch]) -> Callable[[int], TrainBatch]:
    """Prepare batches in a thread."""
    ready: queue.Queue[TrainBatch] = queue.Queue(6)

    def work() -> None:
        while True:
            ready.put(make(0))

    threading.Thread(target=work, daemon=True).start()
    return lambda _step: ready.get()


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description="The twelfth run of the bundled drafter.")
    kinds = parser.add_subparsers(required=True)
    jobs = kinds.add_parser("jobs")
    jobs.set_defaults(run=write_jobs)
    jobs.add_argument("prompts", type=Path)
    jobs.add_argument("target")
    jobs.add_argument("jobs", type=Path)
    writing = kinds.add_parser("write")
    writing.set_defaults(run=write_texts)
    writing.add_argument("jobs", type=Path)
    writing.add_argument("target")
    writing.add_argument("texts", type=Path)
    writing.add_argument("--seconds", type=float, nargs=3, default=(45, 7, 4))
    writing.add_argument("--against", type=Path, nargs="+")
    writing.add_argument("--device", default="cuda")
    training = kinds.add_parser("train")
    training.set_defaults(run=train)
    training.add_argument("config", type=Path)
    training.add_argument("overrides", nargs="*")
    training.add_argument("--seconds", type=float, default=81)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
