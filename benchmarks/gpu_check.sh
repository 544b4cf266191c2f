#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: build, test on the device, look for memory errors, measure.
#
#   gpu_check.sh [build|tests|sanitize|bench ...]     all four, in this order, when none is named
#
# A machine lent by the minute can run the stages in several calls: build (4 minutes at most on 16 cores), tests (8), sanitize (8),
# bench (9). They leave what they built in the tree. A stage that fails does not stop the next ones, and what was found until a limit is
# kept: the output of each stage in OUT (default: build/gpu-check/out), the numbers of each shape, once measured, in OUT/<gpu>.csv, or in
# benchmarks/results/ where OUT is not set. OPS=vq_assign,vq measures these ops alone, UEFL_COMMIT names the commit of a tree without git.
#
# Needs no network and makes no environment: python3 (or PYTHON) must have torch, pybind11, torchvision, pytest, hypothesis and threadpoolctl,
# the build cmake, ninja and a C++ compiler. With pytest-xdist the tests share the cores, with pytest-timeout one that hangs ends alone.
# Without nvcc only the Triton kernels are checked. Every correctness check runs all paths of the search: CUDA C++ with wgmma (sm_90),
# mma.sync and float32 (UEFL_CUDA_SEARCH), and Triton.
set -euo pipefail
cd "$(dirname "$0")/.."
save=${OUT:-}
out=${OUT:-build/gpu-check/out}
python=$("${PYTHON:-python3}" -c "import sys; print(sys.executable)")
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
export PATH=$PATH:$(dirname "$python"):${CUDA_HOME:-/usr/local/cuda}/bin
unset TRITON_INTERPRET UEFL_BACKEND UEFL_CUDA_SEARCH

say() { printf '\ngpu_check: %s\n' "$*"; }
has() { "$python" -c "import $1" 2>/dev/null; }

build() {
  if ! command -v nvcc >/dev/null; then
    say "no nvcc; only the Triton kernels are checked"
    return
  fi
  local capability
  capability=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
  [ "$capability" = 90 ] && capability=90a
  timeout 240 bash -ec "cmake -S . -B build/gpu-check -GNinja -DPython3_EXECUTABLE='$python' -DUEFL_CUDA=ON \
    -DCMAKE_CUDA_ARCHITECTURES=$capability-real -DCMAKE_LIBRARY_OUTPUT_DIRECTORY='$PWD/uefl_kernels'; cmake --build build/gpu-check"
}

tests() {
  # The paths one after the other, the one with most to go wrong last: a kernel that hangs, or leaves the device in an error, spoils what
  # follows it in its process. Triton compiles at every new shape.
  local path failed=0 options=(-p no:cacheprovider -vv --tb=short --maxfail=8 -o timeout=90 -o timeout_method=thread)
  has xdist && options+=(-n "$(($(nproc) < 8 ? $(nproc) : 8))")
  for path in 'not triton and not mma' triton 'mma and not wgmma' wgmma; do
    say "tests: $path"
    timeout 120 "$python" -m pytest -m cuda -k "$path" "${options[@]}" tests/kernels || failed=1
  done
  return $failed
}

sanitize() {
  if ! command -v compute-sanitizer >/dev/null; then
    say "no compute-sanitizer; memory errors are not looked for"
    return
  fi
  # One case of each kind: a kernel runs some hundred times slower here. The allocator would hide what runs past the end of a tensor.
  local tool failed=0 cases='small_strides or small_codeword or empty or ties or segment or small_masks or small_set_proportion'
  cases+=' or (small_transition and (groups or extreme)) or (small_equals and (two or classes))'
  for tool in memcheck racecheck; do
    say "sanitize: $tool"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 240 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$python" -m pytest -m cuda -k "$cases" -vv --tb=short -p no:cacheprovider tests/kernels/test_cuda.py \
      tests/kernels/test_mc_dropout_cuda.py tests/kernels/test_transition_cuda.py || failed=1
  done
  return $failed
}

bench() {
  timeout 540 "$python" -m benchmarks.run --seconds 0.3 ${OPS:+--op "$OPS"} --save ${save:+"$save"}
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
mkdir -p "$out"
failed=()
for stage in "${stages[@]}"; do
  say "$stage"
  set +e  # a stage stops at its first error, the script does not
  (set -e && "$stage") 2>&1 | tee "$out/$stage.log"
  [ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("$stage")
  set -e
done
[ ${#failed[@]} -eq 0 ] || { say "failed: ${failed[*]}"; exit 1; }
