"""Examples on disk in Arrow, so that a second run over the same data does not tokenise again."""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import moaspec.data
import moaspec_core.chat
import moaspec_train.dataset
from moaspec.data.conversations import ReadReport
from moaspec.data.rows import data_files
from moaspec.hub import HUB
from moaspec_core.checkpoint.user_files import open_file
from moaspec_core.support.locks import waited_for
from moaspec_core.support.paths import make_private, trusted
from moaspec_train.dataset.examples import Example

CODE = (moaspec.data, moaspec_core.chat, moaspec_train.dataset)
LIBRARIES = ("jinja2", "tokenizers", "transformers")
"""What makes token ids of rows."""
BATCH = 1024  # examples in memory twice

log = logging.getLogger("moaspec.dataset.example_cache")


def cache_file(sources: Iterable[str], tokenizer: Any, **settings: Any) -> Path | None:
    """The file of the examples of these sources, named by all that their token ids depend on.

    None where that cannot be told: a data set of the hub may change, a file may be missing, and
    only fast tokenizers say what they are.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=sorted).encode())
    digest.update(repr([metadata.version(one) for one in LIBRARIES]).encode())
    for package in CODE:
        for code in sorted(Path(package.__path__[0]).glob("*.py")):
            digest.update(code.read_bytes())
    try:
        if tokenizer is not None:
            facts = (tokenizer.chat_template, tokenizer.special_tokens_map)
            digest.update(tokenizer.backend_tokenizer.to_str().encode())
            digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
        for source in sources:
            if source.startswith(HUB) or not source:
                return None
            passed_by: list[str] = []
            for path in data_files(Path(source), passed_by):
                with open_file(path) as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{path} {content}".encode())
            digest.update(repr(passed_by).encode())
    except (AttributeError, OSError):
        return None
    return trusted("examples", f"{digest.hexdigest()[:32]}.arrow")


def read_cached(path: Path | None) -> tuple[list[Example], ReadReport] | None:
    """The examples of a file, and what was left out as they were read; None if it is not whole.

    Their tokens stay in the file, which is mapped into memory: processes of a run share them.
    """
    if path is None or not path.exists():
        return None
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_file(file) as reader:
            batches = map(reader.get_batch, range(reader.num_record_batches))
            examples = [one for batch in batches for one in _examples(batch["pieces"])]
            facts = json.loads(reader.schema.metadata[b"report"])
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        log.warning("Cannot read %s (%s): reading the data again", path, error)
        return None
    return examples, ReadReport(**{**facts, "unused_columns": Counter(facts["unused_columns"])})


def _lists(examples: Sequence[Example]) -> Any:
    """Examples as an Arrow array of lists of lists."""
    import pyarrow

    tokens = np.concatenate([one.tokens for one in examples])
    starts = np.cumsum([0, *map(len, examples)])
    ends = [start + np.asarray(one.ends) for start, one in zip(starts, examples, strict=False)]
    rows = np.cumsum([0, *(len(one.ends) for one in examples)])
    flat = np.concatenate([[0], *ends]).astype(np.int32)
    pieces = pyarrow.ListArray.from_arrays(flat, pyarrow.array(tokens))
    return pyarrow.ListArray.from_arrays(rows.astype(np.int32), pieces)


def _examples(pieces: Any) -> Iterator[Example]:
    """The examples of an Arrow array of lists of lists."""
    rows, ends = pieces.offsets.to_pylist(), pieces.values.offsets.to_numpy()
    tokens = pieces.values.values.to_numpy()
    for first, last in pairwise(rows):
        start = ends[first]
        yield Example.of(tokens[start : ends[last]], (ends[first + 1 : last + 1] - start).tolist())


@contextlib.contextmanager
def one_at_a_time(path: Path | None) -> Iterator[None]:
    """Let other processes of a run wait, which then find what this one has written."""
    with contextlib.ExitStack() as stack:
        if path is not None:
            with contextlib.suppress(OSError):
                make_private(path.parent)
                stack.callback(os.close, waited_for(path.with_suffix(".lock")))
        yield


def write_cached(path: Path | None, examples: Sequence[Example], report: ReadReport) -> None:
    """Keep examples; where that fails, a warning says so."""
    if path is None:
        return
    import pyarrow

    schema = pyarrow.schema(
        {"pieces": pyarrow.list_(pyarrow.list_(pyarrow.int32()))},
        metadata={"report": json.dumps(vars(report))},
    )
    try:
        make_private(path.parent)
        # Each process of a run writes a file of its own, and the last one stays.
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            scratch = Path(directory, path.name)
            with pyarrow.ipc.new_file(str(scratch), schema) as writer:
                for start in range(0, len(examples), BATCH):
                    pieces = _lists(examples[start : start + BATCH])
                    writer.write(pyarrow.record_batch([pieces], schema=schema))
            scratch.replace(path)
    except OSError as error:
        log.warning("The examples are not kept for the next run: %s", error)
