#!/usr/bin/env bash
# Creates the Conan package of the C++ library as a static and as a shared one, and builds and runs its test_package.
# In a Conan home of its own and without remotes: nothing is downloaded, nothing of the user's is changed.
set -euo pipefail
cd "$(dirname "$0")/.."

export CONAN_HOME=$PWD/build/conan
"$CONAN" profile detect --force
for shared in False True; do
  "$CONAN" create packaging/conan --no-remote --settings compiler.cppstd=20 \
      --conf tools.cmake.cmake_layout:test_folder="$CONAN_HOME/test_package" --options "flash_dmattn/*:shared=$shared"
done
