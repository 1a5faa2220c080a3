#!/usr/bin/env bash
# Reruns the GPU tests that reach every kernel under compute-sanitizer's four tools. `make test-sanitize` calls it after a
# build.
#
#   tools/sanitize_gpu.sh BUILD-DIRECTORY [TOOL...]      default: memcheck racecheck initcheck synccheck
#
# Tools run side by side, and the Python tests of each in GROUPS_PER_TOOL parts (default: as many as there are processors
# for): what takes time is the instrumentation of kernels, by a processor. Logs are in BUILD-DIRECTORY/sanitizer. Does
# nothing where there is no GPU. Any report fails it.
set -euo pipefail
cd "$(dirname "$0")/.."

build=$1
shift
tools=("$@")
[[ ${#tools[@]} != 0 ]] || tools=(memcheck racecheck initcheck synccheck)

if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "compute-sanitizer: skipped, no GPU"
  exit 0
fi
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
groups=${GROUPS_PER_TOOL:-$(($(nproc) / ${#tools[@]}))}
((groups > 0)) || groups=1

# Its name changed in CUDA 13.
only=--kernel-regex
if "$sanitizer" --help 2>&1 | grep -q -e --kernel-name; then only=--kernel-name; fi

# Every allocation of torch is one of the driver's, whose bounds are known.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
# Memory that a test filled would count as initialised.
export FLASH_DMATTN_TEST_POISON=0

# A warp's lanes meet before one of them hands a stage on, by a barrier of the block: that orders all of theirs, too.
indirect=()
if "$sanitizer" --help 2>&1 | grep -q -e --racecheck-indirect-barrier-dependency; then
  indirect=(--racecheck-indirect-barrier-dependency)
fi

logs=$build/sanitizer
rm -rf "$logs"
mkdir -p "$logs"
names=()
pids=()

# start NAME TOOL COMMAND...: in the background, its output in a log of that name.
start() {
  local name=$1 tool=$2
  shift 2
  # Only this library's kernels. The tests fill their inputs by copies, which initcheck knows of.
  local flags=(--tool "$tool" --error-exitcode 1 --print-limit 20 "$only" kns=flash_dmattn)
  [[ $tool != racecheck ]] || flags+=("${indirect[@]}")
  # What the copy engine stores, initcheck does not know to be written.
  local bulk_stores=1
  [[ $tool != initcheck ]] || bulk_stores=0
  FLASH_DMATTN_BULK_STORES=$bulk_stores "$sanitizer" "${flags[@]}" "$@" >"$logs/$name.log" 2>&1 &
  names+=("$name")
  pids+=($!)
}

for tool in "${tools[@]}"; do
  start "$tool-plan" "$tool" "$build/tests/cpp/cuda/cuda_plan_test" --gtest_brief=1 \
    --gtest_filter='PackMask.*:MakePlan.SmallProblems:MakePlan.NothingToPlan'
  start "$tool-selection" "$tool" "$build/tests/cpp/cuda/cuda_selection_test" --gtest_brief=1 \
    --gtest_filter='SelectionCuda.EveryPathOnce:SelectionCuda.NothingToSelectFrom'
  start "$tool-decode" "$tool" "$build/tests/cpp/cuda/cuda_decode_test" --gtest_brief=1 \
    --gtest_filter='Decode.EveryNumberOfRows:DecodeLists.CausalRule:DecodeLists.OrderAndRepeatsDoNotMatter:DecodeLists.LongCaches'
  start "$tool-kept-keys" "$tool" "$build/tests/cpp/cuda/cuda_kept_keys_test" --gtest_brief=1
  for ((group = 1; group <= groups; ++group)); do
    start "$tool-python-$group" "$tool" "${PY:-python3}" -m pytest tests/python/gpu/test_every_kernel.py -q \
      -p no:cacheprovider --timeout 1200 -k "bfloat16 or masks" --splits "$groups" --group "$group"
  done
done

failed=0
for i in "${!pids[@]}"; do
  if wait "${pids[$i]}"; then
    printf '%s: %s\n' "${names[$i]}" "$(grep -hE 'SUMMARY' "$logs/${names[$i]}.log" | tail -1)"
  else
    failed=1
    printf '%s: FAILED\n' "${names[$i]}"
    tail -40 "$logs/${names[$i]}.log"
  fi
done
exit $failed
