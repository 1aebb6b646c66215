"""Let servers write responses for many conversations at once."""

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar, get_args

from moaspec.target.spec import TargetSpec
from moaspec_core.engine.generate_options import sampling_params
from moaspec_core.engine.request_state import GenerationResult
from moaspec_core.errors import InputError, ServerError
from moaspec_core.sampling.params import SETTINGS
from moaspec_core.tokens.token_rules import NO_RULES
from moaspec_train.dataset.endpoint_answers import AnswerReader, PromptForm
from moaspec_train.dataset.endpoint_client import (
    Completion,
    Endpoint,
    EndpointClient,
    UnusableAnswerError,
)
from moaspec_train.dataset.response_writer import (
    ConversationGroup,
    ConversationTask,
    OnProgress,
    OutputRow,
    Writer,
    WriteRequest,
    WriterOptions,
    next_step,
)

WITH_IDS = {"return_token_ids": True, "moaspec": {"sources": True}}
"""Fields by which servers are asked for token ids: vLLM's and moaspec's. Others ignore them."""
PROBE_TOKENS = 4
CHECK_S = 0.2  # the progress is reported this often, also where no answer comes
AHEAD, AHEAD_ROUNDS = 4096, 8
"""Conversations that may be begun behind the first unfinished one: so many, or as many as servers
answer in so many rounds. A long answer does not keep the servers idle before."""

T = TypeVar("T")


@dataclass
class _Server:
    """One server, and how it is asked."""

    client: EndpointClient
    reader: AnswerReader
    model: str = ""
    more_fields: dict[str, Any] = field(default_factory=dict)
    lost: ServerError | None = None


class EndpointWriter(Writer):
    """Decodes conversations by OpenAI-compatible servers of one model.

    A conversation stays with its server. If that is lost, another one goes on with it.

    Args:
        target: config and tokenizer of the servers' model.
        endpoints: the servers.
        options: of generation; `batch_size` has no effect.
        advance: called with the progress; an exception of it ends the writing.
        tell: called with a line when a server is waited for or lost, and at the end for each reason
            why answers were dropped.

    Attributes:
        dropped: reasons why answers could not be used, and how often.
        finished: see `Writer`.

    Raises:
        InputError: the model's generation defaults cannot be asked of a server.
    """

    def __init__(
        self,
        target: TargetSpec,
        endpoints: Sequence[Endpoint],
        options: WriterOptions,
        *,
        advance: OnProgress = lambda *_: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.target, self.options = target, options
        self.dropped: Counter[str] = Counter()
        self.finished: dict[int, list[OutputRow]] = {}
        self._endpoints, self._advance, self._tell = endpoints, advance, tell
        self._sampling = self._sampling_fields()
        self._context = target.max_positions
        self._servers: list[_Server] = []
        self._groups: deque[Collection[int]] = deque()
        self._waiting: deque[tuple[int, ConversationTask, WriteRequest | None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        # One thread, as tokenizers may be used by one at a time: the loop goes on with sockets.
        self._worker = ThreadPoolExecutor(1, "conversations")
        self._servers = [
            _Server(EndpointClient(one, self._tell), AnswerReader(self.target), one.model or "")
            for one in self._endpoints
        ]
        return self

    def __exit__(self, *_: object) -> None:
        loop = self._runner.get_loop()
        closing = loop.create_task(self._close())
        while not closing.done():
            # Ctrl-C in the last step of a pass leaves the loop with an order to stop.
            with contextlib.suppress(RuntimeError):
                loop.run_until_complete(closing)
        self._runner.close()
        self._worker.shutdown()
        for reason, number in self.dropped.most_common():
            self._tell(f"{number} answers of this run dropped: {reason}")

    def connect(self, prompt_ids: Sequence[int]) -> None:
        """Find out the model's name, how servers take prompts, and whether they give token ids.

        Raises:
            ServerError: one cannot be reached, or refuses every form of the prompt.
            InputError: its tokens are not the target's, or it is unclear which model to ask.
        """
        self._runner.run(self._connect_all(prompt_ids))

    def write_groups(self, groups: Iterable[ConversationGroup]) -> Iterator[list[OutputRow]]:
        """Rows of each group in order, next ones under way; ServerError if all servers are lost."""
        for group in groups:
            self._groups.append(group.keys())
            self._waiting += [
                (number, task, None)
                for number, task in group.items()
                if number not in self.finished
            ]
            if len(self._groups) * self.options.group_size > self._ahead():
                yield from self._first_group()
        while self._groups:
            yield from self._first_group()

    def _ahead(self) -> int:
        """Conversations that may be begun behind the first unfinished one."""
        return max(AHEAD, AHEAD_ROUNDS * sum(server.client.pace.limit for server in self._servers))

    def settings(self, **more: object) -> dict[str, object]:
        """The settings that determine the rows, after `connect`."""
        options = dataclasses.asdict(self.options)
        del options["batch_size"]
        return {
            "target": self.target.name,
            "identity": self.target.identity.as_dict(),
            "endpoint_model": ", ".join(sorted({server.model for server in self._servers})),
            "context": self._context,
            **options,
            **self._sampling,
            **more,
        }

    def _first_group(self) -> Iterator[list[OutputRow]]:
        """The rows of the first group, which is forgotten when the caller has saved them."""
        group = self._groups[0]
        self._runner.run(self._wait_for(group))
        yield [row for number in group for row in self.finished[number]]
        self._groups.popleft()
        for number in group:
            del self.finished[number]

    async def _wait_for(self, group: Collection[int]) -> None:
        """Wait for conversations, and for the first error of any."""
        self._start()
        self._advance(0, 0)
        while not self.finished.keys() >= set(group):
            self._news.clear()
            # Python 3.11's `wait_for` may swallow Ctrl-C that comes together with the news.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._news.wait()
            if self._error is not None:
                raise self._error
            self._advance(0, 0)

    def _start(self) -> None:
        """Begin conversations where servers have room, at the one with the largest share of it."""
        while self._waiting:
            free = [one for one in self._servers if one.lost is None and one.client.pace.is_free]
            if not free:
                return
            server = min(free, key=lambda one: one.client.pace.running / one.client.pace.limit)
            server.client.pace.running += 1
            work = self._converse(server, *self._waiting.popleft())
            task = self._runner.get_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, server))

    def _ended(self, server: _Server, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        server.client.pace.running -= 1
        if not task.cancelled() and self._error is None:
            self._error = task.exception()
        if self._error is None:
            self._start()
        self._news.set()

    async def _converse(
        self, server: _Server, number: int, task: ConversationTask, asked: WriteRequest | None
    ) -> None:
        """Take one conversation to its end.

        Args:
            asked: the request that a lost server has left; None for a new conversation.
        """
        step: WriteRequest | list[OutputRow]
        step = await self._aside(next_step, task, None) if asked is None else asked
        while isinstance(step, WriteRequest):
            try:
                result = await self._answer(server, step)
            except UnusableAnswerError as error:
                self.dropped[str(error)] += 1
                step = await self._aside(next_step, task, error)
            except ServerError as error:
                self._lose(server, error)
                self._waiting.appendleft((number, task, step))
                return
            else:
                server.client.pace.answered(len(result.token_ids), time.monotonic())
                self._advance(len(result.token_ids), 0)
                step = await self._aside(next_step, task, result)
        self.finished[number] = step
        self._advance(0, 1)

    def _lose(self, server: _Server, error: ServerError) -> None:
        """Ask a server no more; the error itself if it was the last one."""
        told, server.lost = server.lost is not None, error
        left = sum(one.lost is None for one in self._servers)
        if not left:
            raise error
        if not told:
            self._tell(f"{error} The other servers go on: {left}.")

    async def _aside(self, work: Callable[..., T], *given: Any) -> T:
        """Render and tokenise in a thread, so that sockets do not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *given)

    async def _answer(self, server: _Server, request: WriteRequest) -> GenerationResult:
        room = self._context - len(request.prompt_ids)
        if room < 1:
            raise UnusableAnswerError("its prompt leaves no room in the server's context")
        limit = min(self.options.max_new_tokens, room)
        sampling = dict(self._sampling)
        if self.options.temperature:
            # Some servers take 32 bits.
            sampling["seed"] = (self.options.seed * 1_000_003 + request.number) % 2**31
        fields = {"max_tokens": limit, **sampling}
        answer = await self._completion(server, request.prompt_ids, fields)
        read = partial(server.reader.result, limit=limit)
        result = await self._aside(read, request.prompt_ids, answer)
        if (
            result.stop_reason != "stop_token"
            and len(result.token_ids) < self.options.max_new_tokens
        ):
            result.stop_reason = "context"
        return result

    async def _completion(
        self, server: _Server, prompt_ids: Sequence[int], fields: dict[str, Any]
    ) -> Completion:
        prompt = await self._aside(server.reader.prompt, prompt_ids)
        return await server.client.complete(
            {"model": server.model, "prompt": prompt, **fields, **server.more_fields}
        )

    async def _connect_all(self, prompt_ids: Sequence[int]) -> None:
        await asyncio.gather(*(self._connect(server, prompt_ids) for server in self._servers))

    async def _connect(self, server: _Server, prompt_ids: Sequence[int]) -> None:
        server.model, limit = await server.client.model(self.target.name)
        self._context = min(self._context, limit or self._context)
        fields = {"max_tokens": PROBE_TOKENS, "temperature": 0.0}
        reasons = []
        for form in get_args(PromptForm):
            for more in (WITH_IDS, {}):
                server.reader.form, server.more_fields = form, dict(more)
                try:
                    answer = await self._completion(server, prompt_ids, fields)
                    server.reader.check(prompt_ids, answer)
                except UnusableAnswerError as error:
                    reasons.append(str(error))
                else:
                    return
        raise ServerError(
            f"{server.client} cannot be used for {self.target.name}. Of its answer to a first "
            f"prompt in token ids: {reasons[0]}; as text: {reasons[-1]}."
        )

    def _sampling_fields(self) -> dict[str, Any]:
        """Fields of every request; settings without effect are left out."""
        asked = self.options
        params = sampling_params(
            {"temperature": asked.temperature, "top_p": asked.top_p, "seed": asked.seed},
            self.target.generation_defaults,
        )
        if params.rules != NO_RULES:
            raise InputError(
                "The model's generation_config.json restricts tokens, which cannot be asked of a "
                "server. Leave it out with --generation-config none."
            )
        fields: dict[str, Any] = {
            name: getattr(params, name)
            for name, setting in SETTINGS.items()
            if name in ("temperature", "top_p")
            or (setting.http and setting.plain and params.changes([name]))
        }
        if params.logit_bias:
            # OpenAI's limits; JSON has no infinity.
            fields["logit_bias"] = {
                str(token): min(max(bias, -100.0), 100.0)
                for token, bias in params.logit_bias.items()
            }
        return fields

    async def _close(self) -> None:
        self._waiting.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            await server.client.close()
