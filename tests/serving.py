"""A tiny target that reads and writes bytes, and real servers of it."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import moaspec
import tiny
from moaspec.target.target import Target
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.policy.policies import DraftSettings
from moaspec_serve.app import create_app
from moaspec_serve.server_context import ServeSettings
from moaspec_serve.sources.engine_worker import WorkerLimits
from moaspec_serve.sources.local_source import LocalSource
from moaspec_serve.sources.source import TextSource
from moaspec_serve.uvicorn_server import Server, config

MODEL = "tiny"
START, END = 256, 257
VOCAB = 264
CONTEXT = 2048
LONGEST = 24
"""Tokens of most texts here."""
ENDS_WITHIN_S = 240.0
"""A server that was told to end and runs on for longer has a fault."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message.role + '\n' + message.content + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tokenizer(template: str = CHATML) -> Any:
    """One token a byte, and two special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({one: i for i, one in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in ("<|start|>", "<|end|>")]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    made.chat_template = template
    return made


@functools.cache
def target(template: str = CHATML) -> Target:
    """A target of bytes; nobody changes it."""
    return tiny.fresh_target(
        tokenizer=tokenizer(template),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        eos_token_id=END,
    )


def source(*, drafter: bool = True, template: str = CHATML, **limits: Any) -> LocalSource:
    """An engine whose drafter disagrees with its target."""
    of = target(template)
    return LocalSource(
        of,
        tiny.random_drafter(of) if drafter else None,
        name=MODEL,
        shaping=DraftSettings(Chain(2), free_branches=True),
        limits=WorkerLimits(**limits),
    )


@dataclass
class Served:
    """A server that runs in a thread of its own."""

    url: str
    source: TextSource
    clients: list[OpenAI] = field(default_factory=list)

    @property
    def api(self) -> str:
        """Base URL for clients of OpenAI's."""
        return f"{self.url}/v1"

    def openai(self, key: str = "none") -> OpenAI:
        """The official client, unchanged."""
        client = OpenAI(base_url=self.api, api_key=key, max_retries=0, timeout=300)
        self.clients.append(client)
        return client

    def http(self, **options: Any) -> httpx.Client:
        """An HTTP client without retries."""
        return httpx.Client(base_url=self.url, timeout=300, **options)


@contextmanager
def serving(
    of: TextSource, settings: ServeSettings | None = None, *, grace_s: float = 5.0, port: int = 0
) -> Iterator[Served]:
    """A real server, on a free port unless one is given."""
    server = Server(config(create_app(of, settings), host="127.0.0.1", port=port), of, grace_s)
    started = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        started.set()
        await task

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    started.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    served = Served(f"http://127.0.0.1:{port}", of)
    try:
        yield served
    finally:
        for client in served.clients:
            client.close()
        server.should_exit = True
        thread.join(ENDS_WITHIN_S)
        assert not thread.is_alive(), f"The server did not end; {busy_threads()}"


def busy_threads() -> str:
    """The functions in which threads are, on one line: a short summary shows the whole of it."""
    calls = [traceback.extract_stack(frame)[-5:] for frame in sys._current_frames().values()]
    stacks = [" < ".join(f"{c.name}:{c.lineno}" for c in reversed(one)) for one in calls]
    return "threads: " + "; ".join(one for one in stacks if not one.startswith("_worker"))


def say(text: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def own_text(text: str, max_new_tokens: int = LONGEST, **options: Any) -> str:
    """What the target writes after a question, alone and without drafts."""
    of = target()
    tokens: Any = of.tokenizer
    prompt = tokens.apply_chat_template(say(text), add_generation_prompt=True)["input_ids"]
    result = moaspec.generate(of, prompt, max_new_tokens=max_new_tokens, **options)
    ids = [token for token in result.token_ids if token != END]
    return str(tokens.decode(ids, skip_special_tokens=True))
