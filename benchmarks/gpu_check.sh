#!/usr/bin/env bash
# Check every kernel on a machine with an NVIDIA GPU: it runs, is right, stays within its memory,
# and is timed.
#
#   gpu_check.sh [smoke|tests|bench ...]     all three, in this order, when none is named
#   gpu_check.sh call1                       or call2 to call7: seven calls, half an hour on a Hopper GPU
#
#   smoke   a tiny case of each kernel in a separate process, then where the time of the main shapes goes
#   tests   the tests on the device, path by path, and the small cases again under compute-sanitizer
#   bench   all timings, also of the peers, shape by shape into a CSV
#
#   call1   3 minutes: the searches once, their times by replays (replay.json), then the assumptions of the
#           plans (micro.json)
#   call2   4 minutes: every variant of the search at every shape (variants.json)
#   call3   2 minutes: counters of the best variants and of the kernels, where their time goes (profile.json)
#   call4   4 minutes: the variants that ONLY names, compiled here
#   call5   6 minutes: tests on the paths, then memcheck and racecheck
#   call6   5 minutes: the rows and the peers (the CSV)
#   call7   5 minutes: federated runs from end to end, with a kill and a resume (federated.json)
#
# A machine lent by the minute runs them in a call each: with LIMIT=570 all steps of a call end within 570
# seconds. Every step has its own limit, too, and neither its failure nor its end there stops the next one. A
# step writes to OUT/<step>.log while it runs (default: build/gpu-check/out) and leaves a line in
# OUT/summary.txt; timings go to OUT/<gpu>.csv, or to benchmarks/results/ where OUT is not set. WHEELS=folder
# installs the peers from wheels, OPS=vq_assign,vq measures only these ops, ONLY=regex runs these small cases
# and profiles only these shapes, UEFL_COMMIT names the commit of a tree without git. CUBINS=folder has the
# variants compiled beforehand (python -m benchmarks.gpu_variants compile; default: build/variants).
# DEVICE=cpu rehearses it without a GPU.
#
# The script needs no network and makes no environment: python3 (or PYTHON) must have torch, torchvision,
# pytest, hypothesis and threadpoolctl. Kernels built beforehand for this GPU (uefl_kernels/_C.abi3.so) are
# used as they are; else they are built here with cmake, ninja, pybind11 and nvcc. With pytest-xdist the tests
# share the cores, with pytest-timeout only the test that hangs ends.
set -uo pipefail
cd "$(dirname "$0")/.."
save=${OUT:-}
cubins=${CUBINS:-build/variants}
out=${OUT:-build/gpu-check/out}
device=${DEVICE:-cuda}
python=$("${PYTHON:-python3}" -c "import sys; print(sys.executable)") || exit 2
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
export PATH=$PATH:$(dirname "$python"):${CUDA_HOME:-/usr/local/cuda}/bin
unset TRITON_INTERPRET UEFL_BACKEND UEFL_CUDA_SEARCH
jobs=$(($(nproc) > 16 ? 8 : ($(nproc) + 1) / 2))
unfinished=()
compiled=yes

say() { printf 'gpu_check: %s\n' "$*"; }
has() { "$python" -c "import $1" 2>/dev/null; }

# step NAME SECONDS COMMAND...: ends within its seconds and those left of LIMIT. An interrupt first, which
# leaves Python its summary.
step() {
  local name=$1 seconds=$2 begun=$SECONDS code=0 status=ok
  shift 2
  if [ -n "${LIMIT:-}" ] && [ $((LIMIT - SECONDS - 15)) -lt "$seconds" ]; then
    seconds=$((LIMIT - SECONDS - 15))
  fi
  if [ "$seconds" -lt 1 ]; then
    status=skipped
  else
    timeout -s INT -k 15 "$seconds" "$@" >"$out/$name.log" 2>&1 </dev/null || code=$?
    case $code in
      0) ;;
      124 | 137) status=timeout ;;
      *) status=FAILED ;;
    esac
    tail -n "${LINES_SHOWN:-25}" "$out/$name.log"
  fi
  [ $status = ok ] || unfinished+=("$name")
  printf '%-7s %4d s  %s\n' $status $((SECONDS - begun)) "$name" | tee -a "$out/summary.txt"
}

built() {
  "$python" - <<'END'
import sys, torch
from uefl_kernels import _library
sys.exit(_library.load_error() or not _library.cuda_architecture_built(torch.device("cuda")))
END
}

prepare() {
  if [ -n "${WHEELS:-}" ]; then
    step wheels 60 "$python" -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu-check/peers "$WHEELS"/*.whl
    PYTHONPATH+=:$PWD/build/gpu-check/peers
  fi
  [ "$device" = cuda ] && ! built || return 0
  if ! command -v nvcc >/dev/null; then
    compiled=no
    say "there are no kernels for this GPU and no nvcc, so only the Triton kernels are checked"
    return
  fi
  local capability
  capability=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
  [ "$capability" = 90 ] && capability=90a
  step build 300 bash -ec "cmake -S . -B build/gpu-check -GNinja -DPython3_EXECUTABLE='$python' -DUEFL_CUDA=ON \
    -DCMAKE_CUDA_ARCHITECTURES=$capability-real -DCMAKE_LIBRARY_OUTPUT_DIRECTORY='$PWD/uefl_kernels'; cmake --build build/gpu-check"
}

# small NAME SECONDS OPTIONS...: the small cases.
small() {
  step "$1" "$2" "$python" -m benchmarks.gpu_smoke --device "$device" --only "${ONLY:-}" --out "$out/$1" "${@:3}"
}

smoke() {
  [ $compiled = no ] || LINES_SHOWN=150 small smoke 150 --jobs "$jobs" --paths compiled
  LINES_SHOWN=200 step profile 150 "$python" -m benchmarks.gpu_profile --device "$device" --only "${ONLY:-}" --out "$out"
  [ "$device" = cuda ] || return 0
  counters ncu 90 "$python" -m benchmarks.gpu_profile --once --only "$counted"
  small smoke-triton 200 --jobs "$jobs" --paths triton
}

# federated NAME SECONDS ARGUMENTS...: of the part that trains, which needs more packages.
federated() {
  if has uefl.run; then
    step "$1" "$2" "$python" "${@:3}"
  else
    say "$1 is left out: packages of requirements.txt are missing (set WHEELS to a folder with them)"
  fi
}

# chosen NAME SECONDS SECONDS_EACH EXPRESSION: the tests on the device that the expression chooses.
chosen() {
  local options=(-p no:cacheprovider -vv --tb=short --maxfail=8 -o timeout="$3" -o timeout_method=thread)
  has xdist && options+=(-n "$jobs")
  step "$1" "$2" "$python" -m pytest -m cuda -k "$4" "${options[@]}" tests/kernels
}

tests() {
  if [ $compiled = yes ]; then
    # The path with most to go wrong last: a kernel that leaves the device in an error spoils the rest of its
    # process. Tests that name no path take "auto", the fastest, unless told, so the tests of the layers run
    # on two paths.
    UEFL_CUDA_SEARCH=streamed chosen tests-streamed 90 20 'not triton and not mma'
    UEFL_CUDA_SEARCH=mma chosen tests-mma 90 20 'mma and not wgmma'
    chosen tests-wgmma 90 20 'wgmma or test_nn_state or test_large'
  fi
  if [ $compiled = yes ] && [ "$device" = cuda ] && command -v compute-sanitizer >/dev/null; then
    # The allocator would hide accesses past the end of a tensor. The race checker does not follow bulk
    # copies, which are wgmma's.
    local under="compute-sanitizer --error-exitcode 1 --tool"
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    small memcheck 120 --under "$under memcheck" --paths compiled --limit 60 --jobs "$(nproc)"
    UEFL_CUDA_SEARCH=mma small racecheck 90 --under "$under racecheck" --paths mma,streamed,cuda --limit 60 --jobs "$(nproc)"
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
  fi
  federated tests-federated 60 -m pytest -m cuda -p no:cacheprovider -vv --tb=short tests/federated/test_recording.py
  # Triton compiles at every new shape: without the many small searches, which the other paths have passed.
  chosen tests-triton 200 60 'triton and not (test_cuda and small_equals)'
}

# measure NAME SECONDS OPTIONS...
measure() {
  local options=(--save ${save:+"$save"})
  [ "$device" = cuda ] || options=(--smoke)
  LINES_SHOWN=80 step "$1" "$2" "$python" -m benchmarks.run "${options[@]}" "${@:3}"
}

bench() {
  if [ -n "${OPS:-}" ]; then
    measure bench 540 --op "$OPS"
    return
  fi
  # Kernels that Triton or torch compiles for every shape come last.
  local first=(--without uefl-triton,compiled)
  measure bench-limits 30 --op limits
  measure bench-vq_assign 200 --op vq_assign "${first[@]}"
  measure bench-vq 50 --op vq "${first[@]}"
  measure bench-kmeans 90 --op kmeans_step,kmeans_lloyd "${first[@]}"
  measure bench-mc_dropout 60 --op mc_dropout_mlp,mc_dropout "${first[@]}"
  measure bench-transition 60 --op transition_nll,log_transition_probs,transition_double_softmax,set_proportion_loss "${first[@]}"
  measure bench-rest 80 --op kmeans,layer,residual_vq,rvq,lfq_entropy,fsq,linear,estimator,estimator_sparse "${first[@]}"
  measure bench-compiled 80 --op transition_nll,log_transition_probs,transition_double_softmax,set_proportion_loss --peers compiled
  federated bench-rounds 100 -m benchmarks.uefl_round demo --device "$device" --set arms=uefl --set local_epochs=20 --processes 2,4 --bf16 --turns 2
  measure bench-layer_compiled 60 --op layer_compiled
  measure bench-triton 120 --op vq,mc_dropout_mlp,vq_assign --peers flash-kmeans
}

# variants NAME SECONDS STEP OPTIONS...
variants() {
  local options=(--cubins "$cubins" --out "$out" "${@:4}")
  [ "$device" = cuda ] || options+=(--dry)
  LINES_SHOWN=150 step "$1" "$2" "$python" -m benchmarks.gpu_variants "$3" "${options[@]}"
}

counted='vq 1000000x64x1024$|vq_assign 1000000x128x1024xfloat16|mc_dropout_mlp'

# counters NAME SECONDS COMMAND...: of 16 launches of kernels that search, gather, add up or draw. The CSV has
# the samples of every instruction.
counters() {
  if [ "$device" = cuda ] && command -v ncu >/dev/null; then
    step "$1" "$2" ncu --set full --import-source on --clock-control none -c 16 -o "$out/$1" \
      -k "regex:pack_codebook|search|gather|row_s|head|^(g4|g8|cross)_" "${@:3}"
    step "$1-source" 20 bash -c "ncu --import '$out/$1.ncu-rep' --page source --csv >'$out/$1-source.csv'"
  fi
}

call1() {
  small smoke 40 --jobs "$jobs" --paths wgmma,mma
  local shapes=()
  [ "$device" = cuda ] || shapes=(--shapes 200x32x16)
  LINES_SHOWN=40 step replay 40 "$python" -m benchmarks.gpu_replay --device "$device" --check --out "$out/replay.json" "${shapes[@]}"
  [ -e "$cubins/search.cubin" ] || variants compile 60 compile
  # A kernel that may hang comes last.
  variants micro-rates 30 micro --only 'M[13457]'
  variants micro-memory 25 micro --only 'M[689]'
  variants micro-overlap 20 micro --only M2
}

call2() { variants variants 225 search --seconds 200; }

call3() {
  counters ncu-variants 40 "$python" -m benchmarks.gpu_variants search --cubins "$cubins" --out "$out/ncu" --seconds 30 \
    --only '1000000x(64|512)x1024 (packed_3_1|g4_3_1_turns|g4_2_8_turns)$'
  counters ncu 40 "$python" -m benchmarks.gpu_profile --once --only "$counted"
  LINES_SHOWN=120 step profile 40 "$python" -m benchmarks.gpu_profile --device "$device" --only "${ONLY:-vq}" --out "$out"
}

call4() {
  variants compile 60 compile
  variants variants 160 search --seconds 140 --only "${ONLY:-}"
}

call5() {
  UEFL_CUDA_SEARCH=mma chosen tests-mma 70 20 'mma and not wgmma'
  chosen tests-wgmma 120 20 'wgmma or test_nn_state or test_large'
  [ "$device" = cuda ] && command -v compute-sanitizer >/dev/null || return 0
  local under="compute-sanitizer --error-exitcode 1 --tool"
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  small memcheck 100 --under "$under memcheck" --paths wgmma,mma --limit 60 --jobs "$(nproc)"
  small racecheck 55 --under "$under racecheck" --paths mma --limit 50 --jobs "$(nproc)"
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
}

call6() {
  local first=(--without uefl-triton,compiled)
  measure bench-vq_assign 110 --op vq_assign "${first[@]}" --peers flash-kmeans,flash-kmeans-graph
  measure bench-vq 25 --op vq "${first[@]}"
  measure bench-kmeans 35 --op kmeans_step,kmeans_lloyd "${first[@]}"
  measure bench-mc_dropout 20 --op mc_dropout_mlp "${first[@]}"
  measure bench-layer 30 --op layer,residual_vq
  measure bench-peers 35 --op vq_assign --shape 1000000x64x1024 --without uefl-triton
  measure bench-triton 35 --op vq_assign,vq --shape 1000000x64x256 --peers flash-kmeans
}

call7() { federated runs 295 -m benchmarks.gpu_federated --device "$device" --out "$out"; }

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(smoke tests bench)
for stage in "${stages[@]}"; do
  case $stage in
    smoke | tests | bench | call[1-7]) ;;
    *)
      say "unknown stage '$stage'; expected smoke, tests, bench or call1 to call7"
      exit 2
      ;;
  esac
done
if [ "$device" = cuda ]; then
  "$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu_check: torch finds no GPU on this machine")' || exit 1
fi
mkdir -p "$out"
: >"$out/summary.txt"
prepare
for stage in "${stages[@]}"; do
  "$stage"
done
printf '\n'
cat "$out/summary.txt"
[ ${#unfinished[@]} -eq 0 ] || { say "not ok: ${unfinished[*]}"; exit 1; }
