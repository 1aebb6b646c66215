"""A second process of lowest priority that trains a server's drafter.

The server sends it finished texts through a pipe, and gets new versions of the drafter. The process
loads a second copy of the target.
"""

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from moaspec.generation.drafters import find_drafter
from moaspec.model.checkpoint.moa_checkpoint import fingerprint, load_checkpoint
from moaspec.target.spec import TargetSpec
from moaspec_core.errors import CorruptCheckpointError, MoaSpecError
from moaspec_core.support.locks import claimed
from moaspec_core.support.paths import make_private
from moaspec_train.continual import (
    ContinualTrainer,
    CycleReport,
    LearnConfig,
    fingerprints,
    newest_version,
    other_drafter,
    version_directory,
)

log = logging.getLogger("moaspec.learning_process")

MAX_WAITING_TEXTS = 64
"""Most texts that wait for the process. Further ones are dropped: a server never waits for it."""
LOWEST_PRIORITY = 19  # nice value: the process runs when nothing else does, or nearly so

Text = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """Settings of the process.

    Attributes:
        target, dtype, adapter, tokenizer: as `load_target` takes them. If the server's target is
            rounded, the process still learns with the weights before rounding.
        initial: the drafter to begin with: an alias, directory or hub id.
        directory: of states and versions, see `ContinualTrainer`.
    """

    target: str
    dtype: str
    initial: str
    directory: Path
    adapter: str | None = None
    tokenizer: str | None = None
    config: LearnConfig = field(default_factory=LearnConfig)

    def newest(self) -> str:
        """The drafter to serve with: the newest version, or the initial one.

        Raises:
            TrainingError: the saved state is damaged.
        """
        return str(newest_version(self.directory) or self.initial)


@dataclass(kw_only=True)
class LearningStatus:
    """Numbers for metrics, since the server's start but for `version`; any thread may read them."""

    running: bool = True  # False once the process has failed
    version: int = 0  # newest version of the drafter
    offered: int = 0  # texts that the server has written
    dropped: int = 0  # texts for which the process had no time
    accepted: int = 0  # cycles that made a version
    rolled_back: int = 0  # cycles that were rolled back
    tau: float = 0.0  # simulated tau of the newest version in the latest cycle; 0: no cycle yet


class LearningProcess:
    """Starts the process, sends it texts, and reports new versions.

    Args:
        tell: gets a sentence when a cycle begins and when it ends, in a thread of its own.

    Attributes:
        status: as it is now.
        versions: fingerprints of the initial drafter and of its versions at the start; empty if
            nothing was learned yet.

    Raises:
        TrainingError: the saved state is damaged.
    """

    def __init__(
        self, settings: LearningSettings, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.settings, self._tell = settings, tell
        self.versions = fingerprints(settings.directory)
        self.status = LearningStatus(version=max(0, len(self.versions) - 1))
        self._texts: queue.Queue[Text | None] = queue.Queue(MAX_WAITING_TEXTS)
        self._on_version: Callable[[Path], None] = lambda _: None
        context = multiprocessing.get_context("spawn")
        self._connection, self._child = context.Pipe()
        self._process = context.Process(
            target=_learn, args=(settings, self._child), name="moaspec-learning", daemon=True
        )
        self._thread = threading.Thread(target=self._exchange, name="moaspec-learning", daemon=True)

    def check(self, target: TargetSpec) -> None:
        """Refuse a directory whose versions have another initial drafter, or a changed version.

        Args:
            target: of both drafters.

        Raises:
            InputError: the directory holds such versions.
            UnknownModelError, CheckpointError: the initial drafter cannot be used.
        """
        initial = self.settings.initial
        if not self.versions:
            return
        drafter = load_checkpoint(find_drafter(initial), target.identity, target.config)
        if fingerprint(drafter) != self.versions[0]:
            raise other_drafter(self.settings.directory, initial)
        newest = newest_version(self.settings.directory)
        if newest is None:
            return
        version = load_checkpoint(newest, target.identity, target.config)
        if fingerprint(version) != self.versions[-1]:
            raise CorruptCheckpointError(
                f"The weights in {newest} are not those that were written. Put them back from a "
                "copy, or begin again in another directory."
            )

    def start(self, on_version: Callable[[Path], None]) -> None:
        """Start; `on_version` gets the checkpoint of each new version, in a thread of its own."""
        self._on_version = on_version
        self._process.start()
        self._child.close()  # so that the connection ends with the process
        self._thread.start()

    def offer(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
        """Send a text without waiting; it is dropped if there is no room or no process.

        It is called from one thread.
        """
        self.status.offered += 1
        if self.status.running:
            with contextlib.suppress(queue.Full):
                self._texts.put_nowait((tuple(prompt_ids), tuple(response_ids)))
                return
        self.status.dropped += 1

    def close(self) -> None:
        """End the process; what it has not saved is lost, and no text is kept."""
        self.status.running = False
        if self._process.pid is None:
            return
        self._process.terminate()
        self._process.join()
        with contextlib.suppress(queue.Full):
            self._texts.put_nowait(None)
        self._thread.join()

    def _exchange(self) -> None:
        """Send one text after another and take the report on each."""
        begins = True
        try:
            while (text := self._texts.get()) is not None:
                if begins:
                    self._tell("A learning cycle begins.")
                self._connection.send(text)
                report = self._connection.recv()
                self._take(report)
                begins = report is not None
        except (EOFError, OSError, MoaSpecError) as error:
            if self.status.running:
                log.warning("The drafter learns no more: %s", str(error) or "its process ended.")
        finally:
            self.status.running = False
            self._process.terminate()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._texts.get_nowait()

    def _take(self, report: CycleReport | str | None) -> None:
        if report is None:
            return
        if isinstance(report, str):
            raise EOFError(report)
        self.status.accepted += report.accepted
        self.status.rolled_back += not report.accepted
        self.status.tau = report.tau_before
        if report.accepted:
            self.status.tau = report.tau_after or 0.0
            self._on_version(version_directory(self.settings.directory, report.version))
        self.status.version = report.version
        self._tell(report.sentence())


def _learn(settings: LearningSettings, connection: Connection) -> None:
    """The process: learn from each text and report, until the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which then ends this
    threading.Thread(target=_end_with_server, daemon=True).start()
    if hasattr(os, "nice"):  # not on Windows
        os.nice(LOWEST_PRIORITY)
    import torch

    from moaspec.backends.load import load_target

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        try:
            target = load_target(
                settings.target,
                dtype=settings.dtype,
                packed=False,  # gradients pass through its head
                adapter=settings.adapter,
                tokenizer=settings.tokenizer,
            )
            make_private(settings.directory)
            refusal = f"Another server learns in {settings.directory}; use another directory."
            claimed(settings.directory / ".lock", refusal)  # until the process ends
            trainer = ContinualTrainer(
                target, settings.initial, settings.directory, settings.config
            )
            while True:
                connection.send(trainer.add(*connection.recv()))
        except MoaSpecError as error:
            connection.send(str(error))


def _end_with_server() -> None:
    """End the process with the server, also in the middle of a step; what is saved stays whole."""
    server = multiprocessing.parent_process()
    assert server is not None
    server.join()
    os._exit(1)
