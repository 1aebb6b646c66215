#!/usr/bin/env bash
# Runs a command in the environment that install_vllm_cpu.sh made, set up as vLLM wants it on a CPU.
#
#   scripts/with_vllm.sh vllm serve ...
#
# Every setting can be overridden from outside.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${MOASPEC_VLLM_VENV:-$root/.venv-vllm}
# Without Intel's OpenMP, speculation on a CPU is several times slower.
export LD_PRELOAD="$venv/lib/libiomp5.so${LD_PRELOAD:+:$LD_PRELOAD}"
export KMP_BLOCKTIME=${KMP_BLOCKTIME:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
export PATH="$venv/bin:$PATH"
exec "$@"
