"""What an engine behind endpoints decodes with."""

from __future__ import annotations

import pytest

import tiny
from costs import know, rated, table, watch_reused
from moaspec.generation.shaping import shaping_for
from moaspec_serve.sources.local_source import LocalSource


@pytest.mark.parametrize(("tree", "expected"), [("auto", {2}), ("chain:2", set())])
def test_rows_are_drafted_for_through_the_exit_that_pays(
    tree: str, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch, {0: table(), 2: table(root_s=0.003)})
    reused = watch_reused(monkeypatch)
    target = tiny.fresh_target(tokenizer=tiny.tokenizer())
    module = rated(target, 0.3, 0.8)
    shaping = shaping_for(target, module, tree=tree)
    engine = LocalSource(target, module, shaping=shaping).engine
    handle = engine.add(tiny.PROMPTS[0], max_new_tokens=8, shape=shaping.policy())
    result = engine.result(handle)
    for _ in engine.run():
        pass
    assert tuple(result.token_ids) == tiny.own_texts("llama")[0][:8]
    assert reused == expected
