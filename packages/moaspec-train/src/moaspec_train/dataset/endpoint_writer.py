"""Let a server write responses for many conversations at once."""

import asyncio
import contextlib
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Self, get_args

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


class EndpointWriter(Writer):
    """Decodes conversations by an OpenAI-compatible server.

    Args:
        target: config and tokenizer of the server's model.
        options: of generation; `batch_size` is the number of requests under way at once.
        advance: called with the progress; an exception of it ends the writing.
        tell: called with a line when the server is waited for, and at the end for each reason why
            answers were dropped.

    Attributes:
        dropped: reasons why answers could not be used, and how often.
        finished: see `Writer`.

    Raises:
        InputError: the model's generation defaults cannot be asked of a server.
    """

    def __init__(
        self,
        target: TargetSpec,
        endpoint: Endpoint,
        options: WriterOptions,
        *,
        advance: OnProgress = lambda *_: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.target, self.options = target, options
        self.dropped: Counter[str] = Counter()
        self.finished: dict[int, list[OutputRow]] = {}
        self._endpoint, self._advance, self._tell = endpoint, advance, tell
        self._reader = AnswerReader(target)
        self._sampling = self._sampling_fields()
        self._more_fields: dict[str, Any] = dict(WITH_IDS)
        self._model, self._context = endpoint.model or "", target.max_positions
        self._slots = asyncio.Semaphore(options.batch_size)
        self._groups: deque[dict[int, asyncio.Task[None]]] = deque()

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._client = EndpointClient(self._endpoint, self.options.batch_size, self._tell)
        return self

    def __exit__(self, *_: object) -> None:
        loop = self._runner.get_loop()
        closing = loop.create_task(self._close())
        while not closing.done():
            # Ctrl-C in the last step of a pass leaves the loop with an order to stop.
            with contextlib.suppress(RuntimeError):
                loop.run_until_complete(closing)
        self._runner.close()
        for reason, number in self.dropped.most_common():
            self._tell(f"{number} answers of this run dropped: {reason}")

    def connect(self, prompt_ids: Sequence[int]) -> None:
        """Find out the model's name, how it takes prompts, and whether it gives token ids.

        Raises:
            ServerError: it cannot be reached, or refuses every form of the prompt.
            InputError: its tokens are not the target's, or it is unclear which model to ask.
        """
        self._runner.run(self._connect(prompt_ids))

    def write_groups(self, groups: Iterable[ConversationGroup]) -> Iterator[list[OutputRow]]:
        """Rows of each group in order, next ones under way; ServerError if the server is lost."""
        ahead = 1 + -(-self.options.batch_size // self.options.group_size)
        for group in groups:
            loop = self._runner.get_loop()
            self._groups.append(
                {
                    number: loop.create_task(self._converse(number, task))
                    for number, task in group.items()
                }
            )
            if len(self._groups) > ahead:
                yield from self._first_group()
        while self._groups:
            yield from self._first_group()

    def settings(self, **more: object) -> dict[str, object]:
        """The settings that determine the rows, after `connect`."""
        options = dataclasses.asdict(self.options)
        del options["batch_size"]
        return {
            "target": self.target.name,
            "identity": self.target.identity.as_dict(),
            "endpoint_model": self._model,
            "context": self._context,
            **options,
            **self._sampling,
            **more,
        }

    def _first_group(self) -> Iterator[list[OutputRow]]:
        """The rows of the first group, which is forgotten when the caller has saved them."""
        group = self._groups[0]
        self._runner.run(self._wait_for(group.values()))
        yield [row for number in group for row in self.finished[number]]
        self._groups.popleft()
        for number in group:
            del self.finished[number]

    async def _wait_for(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Wait for conversations, and for the first error of any."""
        pending: Collection[asyncio.Task[None]] = tasks
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=CHECK_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
            self._advance(0, 0)

    async def _converse(self, number: int, task: ConversationTask) -> None:
        """Take one conversation to its end, if an earlier run did not."""
        if number in self.finished:
            return
        async with self._slots:
            step = next_step(task, None)
            while isinstance(step, WriteRequest):
                try:
                    result = await self._answer(step)
                except UnusableAnswerError as error:
                    self.dropped[str(error)] += 1
                    step = next_step(task, error)
                else:
                    self._advance(len(result.token_ids), 0)
                    step = next_step(task, result)
            self.finished[number] = step
            self._advance(0, 1)

    async def _answer(self, request: WriteRequest) -> GenerationResult:
        room = self._context - len(request.prompt_ids)
        if room < 1:
            raise UnusableAnswerError("its prompt leaves no room in the server's context")
        limit = min(self.options.max_new_tokens, room)
        sampling = dict(self._sampling)
        if self.options.temperature:
            # Some servers take 32 bits.
            sampling["seed"] = (self.options.seed * 1_000_003 + request.number) % 2**31
        answer = await self._completion(request.prompt_ids, {"max_tokens": limit, **sampling})
        result = self._reader.result(request.prompt_ids, answer, limit=limit)
        if (
            result.stop_reason != "stop_token"
            and len(result.token_ids) < self.options.max_new_tokens
        ):
            result.stop_reason = "context"
        return result

    async def _completion(self, prompt_ids: Sequence[int], fields: dict[str, Any]) -> Completion:
        prompt = self._reader.prompt(prompt_ids)
        return await self._client.complete(
            {"model": self._model, "prompt": prompt, **fields, **self._more_fields}
        )

    async def _connect(self, prompt_ids: Sequence[int]) -> None:
        self._model, limit = await self._client.model(self.target.name)
        self._context = min(self._context, limit or self._context)
        fields = {"max_tokens": PROBE_TOKENS, "temperature": 0.0}
        reasons = []
        for form in get_args(PromptForm):
            for more in (WITH_IDS, {}):
                self._reader.form, self._more_fields = form, dict(more)
                try:
                    self._reader.check(prompt_ids, await self._completion(prompt_ids, fields))
                except UnusableAnswerError as error:
                    reasons.append(str(error))
                else:
                    return
        raise ServerError(
            f"{self._endpoint.url} cannot be used for {self.target.name}. Of its answer to a first "
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
        tasks = [task for group in self._groups for task in group.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
