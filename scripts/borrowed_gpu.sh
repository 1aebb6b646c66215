#!/usr/bin/env bash
# One block of work on a GPU that may be gone at any minute: responses first, then training.
#
#   scripts/borrowed_gpu.sh PROMPTS RESPONSES CONFIG [key=value ...]
#
# Ends with 75 when there is more to do, with 0 when the drafter is finished, and with the failed
# command's code when something is wrong. Run it again, here or elsewhere with the same files, until
# it ends with 0; between two blocks, copy what has to survive (RESPONSES, RESPONSES.progress,
# RESPONSES.done, OUTPUT/state, OUTPUT/log.jsonl):
#
#   until scripts/borrowed_gpu.sh prompts.jsonl responses.jsonl qwen2.5-0.5b.yaml shard_mb=50
#   do [ $? -eq 75 ] || break; copy_to_a_safe_place; done
#
# Settings, from the environment:
#   BLOCK       time of a block, 8m; long enough for a group of conversations
#   REGENERATE  options of `data regenerate`: "--model NAME --device cuda"
#   MOASPEC     the command, moaspec
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,/^set /p' "$0" | grep '^#' >&2
    exit 2
fi
prompts=$1 responses=$2 config=$3
shift 3
read -ra moaspec <<<"${MOASPEC:-moaspec}"
read -ra options <<<"${REGENERATE:-}"

# The commands end with 75 themselves where the time is over before the work is.
block() {
    "${moaspec[@]}" "$@" --for "${BLOCK:-8m}" || exit $?
}

if [ ! -e "$responses.done" ]; then
    block data regenerate "$prompts" --out "$responses" "${options[@]}"
    touch "$responses.done"
fi
block train "$config" "data=[$responses]" "$@"
