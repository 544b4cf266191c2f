#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: build, test on the device, look for memory errors, measure.
#
#   gpu_check.sh [build|tests|sanitize|bench ...]     all four, in this order, when none is named
#
# Each stage ends by itself and stays under its own limit, so that a machine lent by the minute can run them in several calls:
# build (4 minutes at most on 16 cores), tests (4), sanitize (4), bench (6). They leave what they built in the tree, and what they
# measured in benchmarks/results/<gpu>.csv. Needs no network and makes no environment: python3 (or PYTHON) must have torch, pytest,
# hypothesis, pillow and threadpoolctl.
# Without nvcc only the Triton kernels are checked. Every correctness check runs all paths of the search: CUDA C++ with wgmma (sm_90),
# mma.sync and float32 (UEFL_CUDA_SEARCH), and Triton.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD
unset TRITON_INTERPRET

say() { printf '\ngpu_check: %s\n' "$*"; }

build() {
  if ! command -v nvcc >/dev/null; then
    say "no nvcc; only the Triton kernels are checked"
    return
  fi
  local capability
  capability=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
  [ "$capability" = 90 ] && capability=90a
  timeout 240 cmake -S . -B build/gpu-check -GNinja -DPython3_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
    -DUEFL_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$capability-real" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/uefl_kernels"
  timeout 240 cmake --build build/gpu-check
}

tests() {
  timeout 240 "$python" -m pytest -m cuda tests/kernels -q -p no:cacheprovider
}

sanitize() {
  if ! command -v compute-sanitizer >/dev/null; then
    say "no compute-sanitizer; memory errors are not looked for"
    return
  fi
  # One case of each kind: a kernel runs some hundred times slower here. The allocator would hide what runs past the end of a tensor.
  local tool cases='small_strides or small_codeword or empty or ties or segment or small_masks'
  for tool in memcheck racecheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 120 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$python" -m pytest -m cuda -k "$cases" -q -x -p no:cacheprovider tests/kernels/test_cuda.py tests/kernels/test_mc_dropout_cuda.py
  done
}

bench() {
  timeout 360 "$python" -m benchmarks.run --seconds 0.5 --save
}

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(build tests sanitize bench)
for stage in "${stages[@]}"; do
  case $stage in
    build | tests | sanitize | bench) ;;
    *)
      say "no stage '$stage'; there are build, tests, sanitize, bench"
      exit 2
      ;;
  esac
done
"$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu_check: torch sees no GPU here")'
for stage in "${stages[@]}"; do
  say "$stage"
  "$stage"
done
