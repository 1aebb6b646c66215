"""Activations of prompts on the device's disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from moaspec_core.errors import InputError
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.prefix_cache import BLOCK_TOKENS, PrefixStore
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.server.service import TargetService
from simulated_time import run_simulated

PROMPT = [(7 * i * i + 3 * i) % tiny.VOCAB for i in range(2 * BLOCK_TOKENS + 9)]
SIZE = 6


def store(directory: Path, tenant: str = "alice", **options: Any) -> PrefixStore:
    return PrefixStore(directory, tenant, models="m", token_bytes=SIZE, **options)


def records(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (len(PROMPT), SIZE), dtype=np.uint8)


def test_whole_blocks_come_back_to_their_tenant_and_text(tmp_path: Path) -> None:
    data = records(0)
    store(tmp_path).save(PROMPT, data)
    loaded = list(store(tmp_path).load(PROMPT))
    assert [start for start, _ in loaded] == [0, BLOCK_TOKENS]
    assert b"".join(block for _, block in loaded) == data[: 2 * BLOCK_TOKENS].tobytes()
    changed = [*PROMPT[:BLOCK_TOKENS], 63 - PROMPT[BLOCK_TOKENS], *PROMPT[BLOCK_TOKENS + 1 :]]
    assert [start for start, _ in store(tmp_path).load(changed)] == [0]
    assert list(store(tmp_path, "bob").load(PROMPT)) == []
    assert list(store(tmp_path).load(PROMPT, regime=1)) == []


def test_damaged_blocks_are_forgotten(tmp_path: Path) -> None:
    store(tmp_path).save(PROMPT, records(0))
    for path in tmp_path.glob("*/*"):
        path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    assert list(store(tmp_path).load(PROMPT)) == []
    assert list(tmp_path.glob("*/*")) != []
    store(tmp_path).save(PROMPT, records(0))
    assert len(list(store(tmp_path).load(PROMPT))) == 2


def _huge(block: Path) -> None:
    with block.open("r+b") as file:
        file.truncate(1 << 40)  # holds no bytes; read whole, it would not fit into memory


def _linked(block: Path) -> None:
    block.unlink()
    block.symlink_to("/dev/zero")


def _directory(block: Path) -> None:
    block.unlink()
    block.mkdir()


def _lying(block: Path) -> None:
    block.write_bytes(bytes(len(block.read_bytes())))


@pytest.mark.parametrize("harm", [_huge, _linked, _directory, _lying])
def test_what_is_no_block_is_not_read(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    store(tmp_path).save(PROMPT, records(0))
    for block in tmp_path.glob("*/*"):
        harm(block)
    assert list(store(tmp_path).load(PROMPT)) == []
    store(tmp_path).save(PROMPT, records(0))  # replaced, or left as it is
    assert len(list(store(tmp_path).load(PROMPT))) in (0, 2)


def test_the_least_used_go_first(tmp_path: Path) -> None:
    room = 3 * (BLOCK_TOKENS * SIZE + 16)
    kept = store(tmp_path, max_bytes=room)
    kept.save(PROMPT, records(0))
    kept.save(list(reversed(PROMPT)), records(1))
    files = list(tmp_path.glob("*/*"))
    assert sum(path.stat().st_size for path in files) <= room


def test_a_full_disk_costs_nothing_but_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moaspec_edge.device.prefix_cache.tempfile.mkstemp", full)
    store(tmp_path).save(PROMPT, records(0))
    assert list(store(tmp_path).load(PROMPT)) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="another directory"):
        store(tmp_path / "file")


@pytest.mark.slow
@pytest.mark.parametrize("num_target_layers", [0, 1])
def test_a_second_session_is_sent_less(tmp_path: Path, num_target_layers: int) -> None:
    """And drafts as well as the first, from the very same numbers."""

    async def run() -> list[RemoteSession]:
        target = tiny.target()
        drafter = tiny.agreeing_drafter("llama")
        service = TargetService(target, drafter)
        options = RemoteOptions(
            prefix_dir=tmp_path,
            tenant="alice",
            draft="chain:2",
            draft_ahead=False,
            num_target_layers=num_target_layers,
        )
        sessions = []
        for _ in range(2):
            session = RemoteSession(
                LocalDevice(target, drafter), InProcessTransport(service), options
            )
            async for event in session.stream(PROMPT, max_new_tokens=8):
                if event.start == 0:
                    # Wait for all activations of the prompt, which come behind the first verdict.
                    while len(session._ahead.received) < len(PROMPT):
                        await asyncio.sleep(0.01)
            sessions.append(session)
            await session.close()
        await service.stop()
        return sessions

    first, second = run_simulated(run())
    assert (
        first.result.token_ids == second.result.token_ids == tiny.own_text(tiny.target(), PROMPT, 8)
    )
    assert second.stats.activation_bytes < first.stats.activation_bytes / 3


def test_a_block_that_others_may_have_written_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path).save(PROMPT, records(0))
    (directory,) = tmp_path.iterdir()
    for block in directory.iterdir():
        block.chmod(0o666)
    assert list(store(tmp_path).load(PROMPT)) == []
    (record,) = caplog.records
    assert "others may write" in record.getMessage()


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    store(tmp_path)
    (directory,) = tmp_path.iterdir()
    directory.chmod(0o777)
    with pytest.raises(InputError, match="others may write"):
        store(tmp_path)
