#!/usr/bin/env bash
# Builds wheels from the source distribution in dist/ and puts them there, tagged for every Linux whose C and C++
# libraries are as new as this machine's. Of torch nothing is put into them; CUDA's runtime is linked statically.
#
#   tools/build_wheels.sh cpu|cuda... [-- OPTIONS-OF-PIP-WHEEL...]
#
#   PYTHON               has torch, scikit-build-core, CMake and ninja
#   CUDA_ARCHITECTURES   of the CUDA wheel, as CMAKE_CUDA_ARCHITECTURES
set -euo pipefail
cd "$(dirname "$0")/.."

variants=()
while (($#)) && [[ $1 != -- ]]; do variants+=("$1") && shift; done
(($#)) && shift
tools=$PWD/.venv-packaging/bin
sdist=$(ls dist/flash_dmattn-*.tar.gz)
source=build/sdist/$(basename "$sdist" .tar.gz)
rm -rf build/sdist build/wheels
mkdir -p build/sdist
tar -C build/sdist -xf "$sdist"

# The files' dates in the wheels, so that one commit makes the same wheel again.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
# An object file is the same wherever its sources lie.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1

for variant in "${variants[@]}"; do
  case $variant in
    cpu) settings=(--config-settings=cmake.define.FLASH_DMATTN_CUDA=OFF) ;;
    cuda)
      version=$("${CUDACXX:-nvcc}" --version | sed -nE 's/.*release ([0-9]+)\.([0-9]+).*/\1\2/p')
      [[ -n $version ]] || { echo "build_wheels: nvcc tells no version" >&2; exit 1; }
      settings=(--config-settings=cmake.define.FLASH_DMATTN_CUDA=ON
                --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES="$CUDA_ARCHITECTURES")
      export FLASH_DMATTN_LOCAL_VERSION=cu$version
      ;;
    *) echo "build_wheels: cpu or cuda, not $variant" >&2 && exit 1 ;;
  esac
  echo "build_wheels: $variant"
  "$PYTHON" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "build/wheels/$variant" \
      --config-settings=build-dir="$PWD/build/wheels/$variant/build" "${settings[@]}" "$@" "$source"
  unset FLASH_DMATTN_LOCAL_VERSION
  PATH=$tools:$PATH auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' --wheel-dir "build/wheels/$variant/repaired" \
      "build/wheels/$variant/"flash_dmattn-*.whl
  wheel=$(ls "build/wheels/$variant/repaired/"flash_dmattn-*.whl)
  "$tools/auditwheel" show "$wheel"
  mv "$wheel" dist/
done
