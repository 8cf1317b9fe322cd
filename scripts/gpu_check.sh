#!/usr/bin/env bash
# Everything that only a GPU can say, step by step, each under its own time limit; a step that fails stops no other.
#
#   scripts/gpu_check.sh RESULTS [--seconds N] [STEP...]      # or: make gpu-check RESULTS=folder [STEPS="tests grid"]
#   scripts/gpu_check.sh --list | --help
#
# RESULTS gets at most 8 files: log.txt (all output), summary.txt, and what the steps measured. Without STEP all steps run
# that this machine has the GPUs for, in the order of --list, which is that of their worth. --seconds: all ends by then; a
# step for which less is left than it is expected to take is not begun. Exit status 0: every step was run and passed; 1:
# one was not, or failed; 2: wrong usage, or RESULTS cannot be written.
# Environment: PYTHON (default: the first of .venv/bin/python and python3).
set -uo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
SCRIPT=$PWD/scripts/gpu_check.sh
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# name | GPUs | limit in seconds | expected seconds | what it decides
STEPS='
smoke|1|150|40|the kernels'\'' own tests compile and pass on a GPU
variants|1|420|270|which settings of the expert layer are best; they are written into compute_worker/kernels/configs
grid|1|400|150|every cell of benchmarks.kernels with those settings, merged into kernels.json, and who meets the limits
tests|1|300|120|all tests marked gpu
sanitizer|1|420|200|compute-sanitizer memcheck and racecheck over the small kernel tests
demo|1|240|120|the demo in float32 and bfloat16
decode_step|1|240|120|a whole decode step and prefill of a Qwen3-30B-A3B
tests2|2|300|120|tests marked gpu that need two GPUs
demo2|2|240|120|the demo over two GPUs, float32 and bfloat16
dispatch|2|240|120|dispatch and combine over two GPUs
'

run_pytest() {
  "$PYTHON" -m pytest -p no:cacheprovider -o asyncio_mode=strict -o addopts= -q "$@"
}

# The tests of the kernels that are small enough for a tool that slows them down a hundredfold, one of each kind.
SMALL_TESTS=(tests/kernels/test_moe.py tests/kernels/test_route.py tests/kernels/test_delta_columns.py
             tests/kernels/test_small_kernels.py tests/kernels/test_dense_lora.py)
SMALL='not graph and not bits and not bit_equal and not one_expert and not remote and not activations and not dtypes'
SMALL+=' and not wrong and not early and not (more_rows and (64 or 65 or 81 or 96))'

step_smoke() { run_pytest tests/kernels/test_moe.py tests/kernels/test_delta_columns.py; }

step_variants() {
  "$PYTHON" -m benchmarks.kernel_variants --out "$RESULTS/kernel_variants.json" --configs compute_worker/kernels/configs \
    --seconds 300
  local status=$?
  cp compute_worker/kernels/configs/NVIDIA_H200.json "$RESULTS/" || status=1
  return $status
}

step_grid() {
  local status=0
  "$PYTHON" -m benchmarks.kernels --out "$RESULTS/kernels_run.json" --seconds 330 --compile-processes 12 || status=1
  cp benchmarks/results/kernels.json "$RESULTS/kernels.json" || return 1
  "$PYTHON" -m benchmarks.kernels --out "$RESULTS/kernels.json" --merge "$RESULTS/kernels_run.json" || return 1
  rm -f "$RESULTS/kernels_run.json"
  "$PYTHON" -m benchmarks.kernels --out "$RESULTS/kernels.json" --check || return 1
  return $status
}

step_tests() { run_pytest -m gpu tests/kernels tests/worker_model; }

step_sanitizer() {
  command -v compute-sanitizer >/dev/null || { echo 'compute-sanitizer is not installed'; return 1; }
  local tool part i process status=0 ids ours running=()
  mapfile -t ids < <(run_pytest --collect-only -k "$SMALL" "${SMALL_TESTS[@]}" 2>/dev/null | grep '::')
  [ ${#ids[@]} -gt 0 ] || { echo 'no test was found'; return 1; }
  for tool in memcheck racecheck; do
    for part in 0 1 2; do
      ours=()
      for i in "${!ids[@]}"; do
        [ $((i % 3)) -ne $part ] || ours+=("${ids[i]}")
      done
      # Torch keeps freed memory: with that off, an access past a tensor is an access past an allocation.
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
        --target-processes application-only "$PYTHON" -m pytest -p no:cacheprovider -o asyncio_mode=strict -o addopts= \
        -q "${ours[@]}" 2>&1 |
        sed -u "s/^/$tool $part: /" &
      running+=($!)
    done
  done
  for process in "${running[@]}"; do
    wait "$process" || status=1
  done
  return $status
}

step_demo() {
  "$PYTHON" examples/demo/demo.py --ranks 1 && "$PYTHON" examples/demo/demo.py --ranks 1 --dtype bfloat16
}

step_decode_step() { "$PYTHON" -m benchmarks.decode_step --out "$RESULTS/decode_step.json"; }

step_tests2() { run_pytest -m gpu tests/worker_model; }

step_demo2() {
  "$PYTHON" examples/demo/demo.py --ranks 2 && "$PYTHON" examples/demo/demo.py --ranks 2 --dtype bfloat16
}

step_dispatch() {
  "$PYTHON" -m torch.distributed.run --nproc-per-node 2 -m benchmarks.dispatch --out "$RESULTS/dispatch.json"
}

fields_of() { awk -F'|' -v name="$1" 'NF && $1 == name {print $2, $3, $4}' <<<"$STEPS"; }

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$SCRIPT"; }

refuse() {
  echo "gpu_check.sh: $1" >&2
  exit 2
}

check_steps() {
  local name
  for name in "$@"; do
    [ -n "$(fields_of "$name")" ] || refuse "unknown step '$name'; see --list"
  done
}

main() {
  case ${1:-} in
    --list)
      awk -F'|' 'NF {printf "%-12s %s GPU, about %3d s of at most %3d: %s\n", $1, $2, $4, $3, $5}' <<<"$STEPS"
      exit 0
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    '' | -*)
      usage >&2
      exit 2
      ;;
  esac
  local results=$1
  shift
  local seconds=1000000
  if [ "${1:-}" = --seconds ]; then
    [[ ${2:-} =~ ^[0-9]{1,9}$ ]] || { usage >&2; refuse "--seconds is '${2:-}', expected a whole number"; }
    seconds=$((10#$2))
    shift 2
  fi
  local wanted=("$@") name gpus limit expected num_gpus status code failed=0 began
  check_steps "${wanted[@]}"
  num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
  if [ ${#wanted[@]} -eq 0 ]; then
    mapfile -t wanted < <(awk -F'|' -v have="$num_gpus" 'NF && $2 <= have {print $1}' <<<"$STEPS")
  fi
  case $results in /*) RESULTS=$results ;; *) RESULTS=$CALLED_FROM/$results ;; esac
  if ! mkdir -p -- "$RESULTS" || ! : >"$RESULTS/summary.txt"; then
    refuse "RESULTS is $results: no folder that can be made and written"
  fi
  [ ${#wanted[@]} -gt 0 ] || { echo 'no step can run: this machine has no GPU' | tee -a "$RESULTS/summary.txt"; exit 1; }
  for name in "${wanted[@]}"; do
    read -r gpus limit expected <<<"$(fields_of "$name")"
    if [ "$gpus" -gt "$num_gpus" ]; then
      status="FAILED: needs $gpus GPUs, there are $num_gpus"
    elif [ $((SECONDS + expected)) -gt "$seconds" ]; then
      status="not run: it takes about $expected s, there are $((seconds - SECONDS)) left"
    else
      began=$SECONDS
      [ $((seconds - SECONDS)) -ge "$limit" ] || limit=$((seconds - SECONDS))
      echo "=== $name" | tee -a "$RESULTS/log.txt"
      # A new bash, so that `timeout` may end all of it.
      RESULTS="$RESULTS" PYTHON="$PYTHON" timeout --kill-after 15 "$limit" bash "$SCRIPT" --step "$name" 2>&1 |
        tee -a "$RESULTS/log.txt"
      code=${PIPESTATUS[0]}
      case $code in
        0) status=passed ;;
        124 | 137) status="FAILED: over its limit of $limit s" ;;
        *) status="FAILED: exit status $code" ;;
      esac
      status="$status, $((SECONDS - began)) s"
    fi
    case $status in passed*) ;; *) failed=1 ;; esac
    printf '%-12s %s\n' "$name" "$status" >>"$RESULTS/summary.txt"
  done
  echo '=== summary'
  cat "$RESULTS/summary.txt"
  exit $failed
}

if [ "${1:-}" = --step ]; then
  check_steps "${2:-}"
  [ -n "${RESULTS:-}" ] || refuse "--step is what this script runs itself by; give RESULTS and the names of steps"
  "step_$2"
else
  main "$@"
fi
