#!/usr/bin/env bash
# Prepares this checkout for `make run` and `make test`: installs the Debian packages that are missing and the
# pinned Python packages into .venv, whose Python then finds this checkout's package from any folder. Does nothing,
# quickly, when all is there.
#
#   tools/setup.sh         the above; with PYTHON=... in the environment no .venv is made and nothing is
#                          installed into that Python, only checked
#   tools/setup.sh build   the same, of Python packages only those that the library is built and examples are run with
#   tools/setup.sh fuzz    also Clang with libFuzzer
#   tools/setup.sh neon    also the cross-compiler for 64-bit Arm and an emulator to run what it builds
#   tools/setup.sh docs    only what the documentation site needs: the pinned packages into .venv-docs
#   tools/setup.sh check-docs    only what looks at that site: Chromium, unless Chrome is there, and .venv-check-docs
#   tools/setup.sh packaging    only what packages are built and tried with: the pinned packages into .venv-packaging
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
have_header() { printf '#include <%s>\n' "$1" | "${CXX:-g++}" -x c++ -std=c++17 -E - >/dev/null 2>&1; }

links_fuzzers() {
  echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    clang++ -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2>/dev/null
}

# The Debian packages of what this machine lacks, whichever way it would have got it.
missing_packages() {
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  if [[ ${1:-} == check-docs ]]; then
    command -v chromium >/dev/null || command -v google-chrome >/dev/null || echo chromium
  fi
  [[ ${1:-} != *docs && ${1:-} != packaging ]] || return 0
  command -v "${CXX:-g++}" >/dev/null || echo g++
  have_header hwy/highway.h || echo libhwy-dev
  have_header gtest/gtest.h || echo libgtest-dev
  command -v ccache >/dev/null || echo ccache
  # torch.compile, which some tests use, compiles against Python.h.
  [[ -e $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] || echo python3-dev
  if [[ ${1:-} == fuzz ]]; then
    command -v clang++ >/dev/null || echo clang
    # The sanitizers' libraries are a package of the compiler's version.
    local version
    version=$(clang++ -dumpversion 2>/dev/null | cut -d. -f1)
    [[ -z $version ]] || links_fuzzers || echo "libclang-rt-$version-dev"
  fi
  if [[ ${1:-} == neon ]]; then
    command -v aarch64-linux-gnu-g++ >/dev/null || echo g++-aarch64-linux-gnu
    command -v qemu-aarch64-static >/dev/null || echo qemu-user-static
    [[ -e /usr/src/googletest/CMakeLists.txt ]] || echo googletest
  fi
}

install_packages() {
  local packages sudo=()
  packages=$(missing_packages "$@" | xargs)
  [[ -n $packages ]] || return 0
  command -v apt-get >/dev/null || fail "this machine lacks what Debian calls: $packages. Please install it."
  if [[ $(id -u) != 0 ]]; then
    command -v sudo >/dev/null || fail "please run as root: apt-get install $packages"
    sudo=(sudo)
  fi
  say "installing Debian packages: $packages"
  "${sudo[@]}" apt-get update -qq
  # shellcheck disable=SC2086  # a list of words
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
  packages=$(missing_packages "$@" | xargs)
  # Some are only known to be missing once others are there.
  if [[ -n $packages ]]; then
    say "installing Debian packages: $packages"
    # shellcheck disable=SC2086
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
    packages=$(missing_packages "$@" | xargs)
  fi
  [[ -z $packages ]] || fail "still missing after their installation: $packages"
}

# The names that these files pin and the given Python does not have.
check_python() {
  local missing
  missing=$("$python" - "$@" <<'EOF'
import importlib.metadata, pathlib, re, sys
for file in sys.argv[1:]:
    for name in re.findall(r"^([\w-]+)==", pathlib.Path(file).read_text(), re.M):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(name)
EOF
  )
  # cmake, ninja and clang-format may as well be the system's.
  for tool in cmake ninja clang-format; do
    if command -v "$tool" >/dev/null; then missing=$(grep -vx "$tool" <<<"$missing" || true); fi
  done
  [[ -z $missing ]] || fail "$python lacks $(xargs <<<"$missing"): $python -m pip install -r ${!#}"
}

# stamp_of FOLDER REQUIREMENTS...: the file that says that this Python's environment has what these files pin.
stamp_of() {
  local venv=$1
  shift
  echo "$venv/.installed-$(cat "$@" <("$python" -c 'import sys; print(sys.version)') | sha256sum | cut -c1-16)"
}

# make_venv FOLDER REQUIREMENTS...: does nothing if the folder has what these files pin; pip installs the last of them.
make_venv() {
  local venv=$1 version stamp
  stamp=$(stamp_of "$@")
  shift
  version=$("$python" -c 'import sys; print(sys.version)')
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python 3.11 is needed; $python is $version"
  [[ -e $stamp ]] && return 0
  say "installing the packages that ${!#} pins into $venv (torch, where it is one of them, takes some minutes)"
  rm -f "$venv"/.installed-*
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
  # Bytecode is compiled when it is first imported: that of all packages takes longer than to install them.
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile -r "${!#}"
  touch "$stamp"
}

# A path entry, read when Python starts: .venv/bin/python imports flash_dmattn from python/, also without the Makefile's
# PYTHONPATH. It stands last on sys.path, behind a package that was installed.
link_package() {
  local entry=$PWD/python file
  for file in .venv/lib/python3*/site-packages; do
    file+=/flash_dmattn_checkout.pth
    [[ -e $file && $(<"$file") == "$entry" ]] || echo "$entry" >"$file"
  done
}

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python was not found"
install_packages "$@"
if [[ ${1:-} == *docs || ${1:-} == packaging ]]; then
  make_venv ".venv-$1" "requirements-$1.txt"
else
  # Each of these files begins with the one before.
  build=(requirements.txt requirements-build.txt) all=(requirements.txt requirements-build.txt requirements-dev.txt)
  wanted=("${all[@]}")
  if [[ ${1:-} == build && (-n ${PYTHON:-} || ! -e $(stamp_of .venv "${all[@]}")) ]]; then wanted=("${build[@]}"); fi
  if [[ -n ${PYTHON:-} ]]; then
    check_python "${wanted[@]}"
  else
    make_venv .venv "${wanted[@]}"
    link_package
  fi
fi
