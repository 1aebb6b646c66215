"""The Triton kernel, run by Triton's interpreter, against the plain reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.slow

CHECK = """
import torch
import test_cache_reader as layouts
from moaspec_vllm.paged_drafter.cache_reader import CacheReader, HeadShare

for dtype in (torch.float32, torch.bfloat16):
    for write in (layouts.plain, layouts.transposed):
        for order in ((0, 1, 2, 3, 4), (1, 0, 2, 3, 4)):
            caches = layouts.caches(*order, dtype=dtype)
            # Layers of their own memory, as vLLM allocates them, and in another order.
            layers = [layouts.Layer(one.clone(memory_format=torch.preserve_format), write)
                      for one in caches][::-1]
            for layer, key, value in zip(layers, *layouts.states(0, dtype=dtype), strict=True):
                write(key, value, layer.kv_cache, layouts.SLOTS)
            reader = CacheReader(layers, HeadShare(total=layouts.HEADS, ranks=1))
            expected = reader.read_own(layouts.SLOTS)
            reader._gather = reader._kernel()
            assert torch.equal(reader.read_own(layouts.SLOTS), expected)
            assert reader.read_own(layouts.SLOTS[:0]).shape[0] == 0
print("equal")
"""


def test_all_layers_are_read_in_one_launch() -> None:
    folders = [str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
