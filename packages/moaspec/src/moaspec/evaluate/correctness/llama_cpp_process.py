"""Computes log-probabilities with llama.cpp, in a process of its own, which it may abort.

Reads a JSON object from standard input (`model`, `token_ids`, `start`, `num_best`, `threads`) and
writes a line of JSON for each position from `start` on: the log-probabilities of the `num_best`
likeliest tokens after the tokens before it, as `[token, log-probability]`.
"""

import json
import sys
from typing import Any

import xllamacpp


def main() -> None:
    """Answer the request on standard input."""
    asked = json.load(sys.stdin)
    ids = asked["token_ids"]
    server = xllamacpp.Server(_parameters(asked["model"], len(ids), asked["threads"]))
    for position in range(asked["start"], len(ids) + 1):
        answer = server.handle_completions(
            {
                "prompt": ids[:position],
                "n_predict": 1,
                "n_probs": asked["num_best"],
                "temperature": 0.0,
                "cache_prompt": True,  # each position computes one token
            }
        )
        if "choices" not in answer:
            raise SystemExit(str(answer)[:500])
        (one,) = answer["choices"][0]["logprobs"]["content"]
        found = [[best["id"], best["logprob"]] for best in one["top_logprobs"]]
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def _parameters(model: str, length: int, threads: int) -> Any:
    """One slot, keys and values in float32, the file mapped rather than copied."""
    made = xllamacpp.CommonParams()
    made.model.path = model
    made.n_ctx, made.n_parallel = length + 8, 1
    made.cpuparams.n_threads = made.cpuparams_batch.n_threads = threads
    made.cache_type_k = made.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    made.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    made.swa_full = True
    made.warmup = made.fit_params = False
    made.no_extra_bufts = True  # they copy the weights
    made.n_gpu_layers = 0
    made.cache_ram_mib = 0
    return made


if __name__ == "__main__":
    main()
