#!/usr/bin/env bash
# Reruns a small set of GPU tests under compute-sanitizer's four tools. `make test-sanitize` calls it after a build.
#
#   tools/sanitize_gpu.sh BUILD-DIRECTORY [TOOL...]      default: memcheck racecheck initcheck synccheck
#
# Does nothing where there is no GPU. Any report fails it.
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

for tool in "${tools[@]}"; do
  # Only this library's kernels. The tests fill their inputs by copies, which initcheck knows of.
  flags=(--tool "$tool" --error-exitcode 1 --print-limit 20 "$only" kns=flash_dmattn)
  [[ $tool != racecheck ]] || flags+=("${indirect[@]}")
  printf '=== %s\n' "$tool"
  "$sanitizer" "${flags[@]}" "$build/tests/cpp/cuda/cuda_plan_test" --gtest_brief=1 \
    --gtest_filter='PackMask.*:MakePlan.SmallProblems:MakePlan.NothingToPlan'
  "$sanitizer" "${flags[@]}" "$build/tests/cpp/cuda/cuda_selection_test" --gtest_brief=1 \
    --gtest_filter='SelectionCuda.EveryPathOnce:SelectionCuda.NothingToSelectFrom'
  "$sanitizer" "${flags[@]}" "$build/tests/cpp/cuda/cuda_decode_test" --gtest_brief=1 \
    --gtest_filter='DecodeLists.CausalRule:DecodeLists.OrderAndRepeatsDoNotMatter:DecodeLists.LongCaches'
  "$sanitizer" "${flags[@]}" "${PY:-python3}" -m pytest tests/python/gpu/test_every_kernel.py -q -p no:cacheprovider \
    --timeout 1200 -k "bfloat16 or masks"
done
