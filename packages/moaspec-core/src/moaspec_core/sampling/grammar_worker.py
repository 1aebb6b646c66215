"""Compiles a grammar in a process that may die: run as a script by `grammar.py`.

llguidance recurses on the native stack, and an overflow there ends the process. The grammar comes
on standard input. Exit status 0: compiling ended, with a matcher or with an error that llguidance
can tell. Anything else: the grammar is too much.
"""

import contextlib
import json
import os
import re
import sys
import threading
from typing import Any

NAMED_TOKEN = re.compile(r"<[A-Za-z_|][^<>\s]{0,80}>")
"""A special token by name; only the target's tokenizer knows which there are."""


def bound(seconds: int, num_bytes: int) -> None:
    """Limit this process's time and memory, if the system can, and lower its priority."""
    with contextlib.suppress(AttributeError, OSError):
        os.nice(19)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def compile_once(grammar: str, vocab_size: int, most_items: int) -> None:
    """Compile as the server will, without its vocabulary."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    # Without a tokenizer every special token is allowed, so that no error comes too early.
    if LLMatcher.validate_grammar(grammar):
        return
    tokenizer = LLTokenizer("byte", n_vocab=vocab_size)
    limited = LLParserLimits(max_items_in_row=most_items)
    for text in (grammar, NAMED_TOKEN.sub("<[0]>", grammar)):
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limited)
        if not matcher.is_error():
            matcher.compute_bitmask()
            return


def succeeds(grammar: str, vocab_size: int, most_items: int) -> bool:
    """Whether compiling ends, with a matcher or an error."""
    try:
        compile_once(grammar, vocab_size, most_items)
    except ValueError:
        return True  # the next compilation raises the same error
    except BaseException:  # noqa: BLE001 - no memory, or a panic in llguidance
        return False
    return True


def main() -> None:
    """Read a grammar and try it."""
    given: dict[str, Any] = json.load(sys.stdin)
    sys.path[:] = given["path"]
    import llguidance  # noqa: F401 - before the limits: its libraries take address space

    bound(given["seconds"], given["memory"])
    threading.stack_size(given["stack"])
    ended: list[bool] = []
    tried = (given["grammar"], given["vocab_size"], given["items"])
    work = threading.Thread(target=lambda: ended.append(succeeds(*tried)))
    work.start()
    work.join()
    sys.exit(0 if ended == [True] else 1)


if __name__ == "__main__":
    main()
