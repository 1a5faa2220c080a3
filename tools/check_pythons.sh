#!/usr/bin/env bash
# Installs the CPU wheel of dist/ with other Pythons and versions of torch, each pair in an environment of its own
# outside the source tree, and runs the tests of its kernels there. uv fetches a Python that the machine lacks.
#
#   tools/check_pythons.sh "PYTHONS" "TORCHES"    e.g. "3.12 /opt/python3.14/bin/python3" "2.11.0 latest"
set -uo pipefail
cd "$(dirname "$0")/.."

uv=$PWD/.venv-packaging/bin/uv
wheel=$(ls "$PWD"/dist/flash_dmattn-*-manylinux*.whl | grep -v '+')
[[ -n $wheel ]] || { echo "check_pythons: dist/ has no CPU wheel: make wheels WHEELS=cpu" >&2; exit 1; }
tests=(tests/python/test_{key_indices,selection,attention_cases}.py)
export -n PYTHONPATH
export OMP_NUM_THREADS=1

# try FOLDER PYTHON TORCH: the last line that it prints is the outcome.
try() {
  local folder=$1 python=$2 torch=torch
  [[ $3 == latest ]] || torch+===$3
  "$uv" venv --quiet --clear --python "$python" "$folder" || return 1
  "$uv" pip install --quiet --python "$folder" "$wheel[test]" "$torch" || return 1
  (cd / && "$folder/bin/python" -c '
import platform, sys, torch, flash_dmattn
assert flash_dmattn.__file__.startswith(sys.prefix), flash_dmattn.__file__
print(f"Python {platform.python_version()}, torch {torch.__version__}")') || return 1
  (cd / && "$folder/bin/python" -m flash_dmattn info) || return 1
  "$folder/bin/python" -m pytest -q -p no:cacheprovider "${tests[@]}" || return 1
}

failed=()
for python in $1; do
  for torch in $2; do
    folder=$PWD/build/pythons/$(tr / - <<<"$python")-$torch
    try "$folder" "$python" "$torch" || failed+=("$python with torch $torch")
    rm -rf "$folder"
  done
done
if ((${#failed[@]})); then
  printf 'check_pythons: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
