"""Two ranks of tensor parallelism as two processes over gloo, whose clocks differ.

Ranks that draft otherwise than the others would wait for them in a collective operation for ever.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

RANK = """
import contextlib, json, random, sys
from types import SimpleNamespace
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm_batch import DEPTH, MOST, Batch
from moaspec_vllm import proposer as module
from moaspec_vllm.load_aware import LoadAwareDrafts, MeasuredSteps, StepTimes
from moaspec_vllm.paged_drafter.vllm_drafting import PagedDrafter

rank, path = int(sys.argv[1]), sys.argv[2]
config = VllmConfig()
config.parallel_config.tensor_parallel_size = 2
config.parallel_config.world_size = 2
with set_current_vllm_config(config):
    init_distributed_environment(2, rank, "file://" + path, rank, backend="gloo")
    initialize_model_parallel(2)

now, chance = [0.0], random.Random(0)
module.time = SimpleNamespace(perf_counter=lambda: now[0])

def decisions(share):
    batch = Batch()
    measured = MeasuredSteps(sizes=(1, MOST), plain_s=(0.010, 0.012), drafted_s=(0.013, 0.030),
                             token_s=1e-5)
    times = StepTimes(measured, max_requests=MOST, share=share or batch.proposer._share)
    chooser = LoadAwareDrafts(times, length=DEPTH, rate=0.6)
    batch.proposer._chooser, batch.proposer._depths = chooser, None
    found, drafts = [], []
    for turn in range(30):
        number = (1, 3, 8)[turn % 3]
        starts, computed, new = [0] * number, [20] * number, [1] * number
        batch.input.req_ids, batch.proposer._drafter._names = [], []
        for _ in range(12):
            batch.proposer.begin_step(sum(computed), number)
            drafts = batch.step(starts, computed, new)
            found.append([len(chain) for chain in drafts])
            # Drafts take the second rank three times as long.
            now[0] += (0.012 + 0.03 * rank if any(drafts) else 0.010) * chance.uniform(0.8, 1.2)
            starts = [a + b for a, b in zip(starts, computed)]
            computed = new = [1 + len(chain) for chain in drafts]  # all are right
    return found

with torch.inference_mode():
    shared, own = decisions(None), decisions(list)

    # One rank cannot capture its graphs: none has any.
    batch = Batch()
    module.capturing = lambda _: contextlib.nullcontext()
    torch.accelerator.synchronize = lambda: None
    dropped = []
    batch.proposer._graphs = SimpleNamespace(capture=lambda: None,
                                             clear=lambda: dropped.append("target"))
    def capture(depths):
        if rank:
            raise RuntimeError("out of memory")
    drafter = SimpleNamespace(capture=capture, drop_graphs=lambda: dropped.append("drafts"))
    batch.proposer._capture(drafter)
print(json.dumps({"shared": shared, "own": own, "dropped": dropped}))
"""


def test_ranks_with_other_clocks_draft_alike(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_DIST_IDENT": tmp_path.name,  # of the memory that ranks share
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    answers = []
    try:
        for rank in ranks:
            told, errors = rank.communicate(timeout=600)
            assert rank.returncode == 0, errors[-4000:]
            answers.append(json.loads(told.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()  # where the other one failed
    first, second = answers
    assert first["shared"] == second["shared"]
    assert {sum(lengths) > 0 for lengths in first["shared"]} == {True, False}
    assert first["own"] != second["own"]  # as they would by themselves
    assert first["dropped"] == second["dropped"] == ["target", "drafts"]
