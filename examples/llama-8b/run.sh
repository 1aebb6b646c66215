#!/usr/bin/env bash
# From prompts to a served drafter of Llama-3.1-8B-Instruct, on one node of eight GPUs of 80 GB:
#
#   pip install moaspec moaspec-train vllm && huggingface-cli login
#   examples/llama-8b/run.sh
#
# Each step goes on where it stopped: run the script again. Variables change it:
#
#   REPOSITORY=me/my-drafter   publishes the drafter; by default it stays here
#   MODEL, PROMPTS, LIMIT      the target; prompts, as docs/data.md lists; and how many
#   GPUS, SERVE, PORT          servers that answer: one a GPU, what starts one, the first one's port
#   CONFIG, SETTINGS           of the training: a name of moaspec train --init, and key=value ...
#   OUT                        a directory for everything
set -euo pipefail

MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
PROMPTS=${PROMPTS:-hub:HuggingFaceH4/ultrachat_200k@train_sft}
LIMIT=${LIMIT:-200000}
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-1024}
GPUS=${GPUS:-8}
GPU=${GPU:-h100}
DEVICE=${DEVICE:-cuda}
SERVE=${SERVE:-vllm serve}
PORT=${PORT:-8100}
CONFIG=${CONFIG:-llama-3.1-8b}
SETTINGS=${SETTINGS:-}
EVALUATED=${EVALUATED:-40}
REPOSITORY=${REPOSITORY:-}
OUT=${OUT:-runs/llama-3.1-8b}

mkdir -p "$OUT"
responses=$OUT/responses.jsonl.gz drafter=$OUT/run/best

say() { echo "== $*"; }

servers=()
stop_servers() {
    for server in "${servers[@]}"; do kill "$server" 2> "/dev/null" || true; done
    for server in "${servers[@]}"; do wait "$server" || true; done
    servers=()
}
trap stop_servers EXIT

answer() {
    local endpoints=() port gpu
    for ((gpu = 0; gpu < GPUS; gpu++)); do
        port=$((PORT + gpu))
        # shellcheck disable=SC2086 # SERVE has several words
        CUDA_VISIBLE_DEVICES=$gpu $SERVE "$MODEL" --port "$port" > "$OUT/server-$gpu.log" 2>&1 &
        servers+=($!)
        endpoints+=(--endpoint "http://127.0.0.1:$port")
    done
    for ((gpu = 0; gpu < GPUS; gpu++)); do
        until curl --silent --fail --output "/dev/null" "http://127.0.0.1:$((PORT + gpu))/v1/models"; do
            kill -0 "${servers[gpu]}" || { tail "$OUT/server-$gpu.log"; exit 1; }
            sleep 1
        done
    done
    moaspec data regenerate "$PROMPTS" --limit "$LIMIT" --out "$responses" --model "$MODEL" \
        "${endpoints[@]}" --max-new-tokens "$MAX_NEW_TOKENS" --skip-malformed
    stop_servers # their memory is needed for training
}

say "Answers of $MODEL, by $GPUS servers"
if [ ! -e "$OUT/answered" ]; then
    answer
    touch "$OUT/answered"
fi

say "Statistics"
moaspec data stats "$responses" --model "$MODEL"

say "Plan"
[ -e "$OUT/$CONFIG.yaml" ] || (cd "$OUT" && moaspec train --init "$CONFIG")
read -ra settings <<< "$SETTINGS"
run=("$OUT/$CONFIG.yaml" "target=$MODEL" "data=$responses" "output=$OUT/run" "${settings[@]}")
moaspec train "${run[@]}" --dry-run --gpu "${GPUS}x$GPU"

say "Training by $GPUS processes"
torchrun --nproc-per-node "$GPUS" -m moaspec train "${run[@]}"

say "Evaluation"
moaspec eval --model "$MODEL" --drafter "$drafter" --device "$DEVICE" --limit "$EVALUATED" \
    --methods plain,moa --out "$OUT/eval"

if [ -n "$REPOSITORY" ]; then
    say "Publishing"
    moaspec checkpoint push "$drafter" "$REPOSITORY"
fi

say "Serving, by vLLM with the plugin moaspec-vllm or by moaspec serve"
moaspec vllm-config "$drafter" --model "$MODEL"
echo "moaspec serve --model $MODEL --drafter $drafter --device $DEVICE"
