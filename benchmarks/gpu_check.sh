#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: build, test on the device, look for memory errors, measure. Needs a python3 that has torch
# (PYTHON names another one), and makes no environment of its own. Without nvcc only the Triton kernels are checked.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD
unset TRITON_INTERPRET

"$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu_check: torch sees no GPU here")'

if command -v nvcc >/dev/null; then
  cmake -S . -B build/gpu-check -GNinja -DPython3_EXECUTABLE="$(command -v "$python")" -DUEFL_CUDA=ON \
    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/uefl_kernels"
  cmake --build build/gpu-check
else
  echo "gpu_check: no nvcc; only the Triton kernels are checked"
fi

"$python" -m pytest -m cuda tests/kernels
if command -v compute-sanitizer >/dev/null; then
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 "$python" -m pytest -m cuda -k small tests/kernels
else
  echo "gpu_check: no compute-sanitizer; memory errors are not looked for"
fi
"$python" -m benchmarks.run --save
