# make run     trains the example model (ARGS="--steps 10" and so on are passed to it)
# make test    formatting, C++ tests, Python tests
# make bench   compares with PyTorch's attention; make results measures all that docs/ says of CPUs
# make help    everything else
#
# Each sets up what it needs first: Debian packages, .venv, the build. PYTHON=path/to/python uses an environment
# that has torch already instead of .venv; PRESET=debug another preset of CMakePresets.json.

SHELL := /bin/bash
.DEFAULT_GOAL := help
PRESET ?= release
ARGS ?=
RUNS ?= 1000000 200000 100000
REPEATS ?= 7
# Of `make wheels`: the CUDA one where its compiler is; machine code for GPUs of 8.x and 9.0, PTX for all later ones, as
# of PRESET=ci.
WHEELS ?= cpu $(if $(shell command -v $${CUDACXX:-nvcc}),cuda)
CUDA_ARCHITECTURES ?= 80-real;90-real;80-virtual
# Of `make check-pythons`: interpreters (paths, or versions that uv finds or fetches) and versions of torch.
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
TORCHES ?= 2.11.0 latest

ifdef PYTHON
  PY := $(shell command -v $(PYTHON))
  ifndef PY
    $(error PYTHON=$(PYTHON) was not found)
  endif
  override PYTHON := $(PY)
  export PYTHON
else
  PY := $(CURDIR)/.venv/bin/python
endif
# cmake, ninja, clang-format and ruff are pinned packages of that environment.
export PATH := $(dir $(PY)):$(PATH)
export CMAKE_CXX_COMPILER_LAUNCHER = $(shell command -v ccache)
export CMAKE_CUDA_COMPILER_LAUNCHER = $(CMAKE_CXX_COMPILER_LAUNCHER)
# What one clone has compiled, ccache has for all others: paths below this folder count as relative ones.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))

BUILD := build/$(PRESET)
CONFIGURE = cmake >/dev/null
# FUZZ NAME LARGEST-INPUT WHICH-OF-RUNS. Inputs may have any length from the start: decisions that come late count as well.
FUZZ = mkdir -p build/fuzz/found/$(1) && build/fuzz/tests/cpp/fuzz_$(1) -runs=$(word $(3),$(RUNS)) -max_len=$(2) \
           -len_control=0 -print_final_stats=1 -artifact_prefix=build/fuzz/found/$(1)- build/fuzz/found/$(1)
CPP_FILES = $(shell find include src torch tests examples benchmarks \
                -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# Of the C library: memory that was freed is kept, and not asked of the system, page by page, for every tensor anew. It
# is a tenth of the tests' time.
KEEP_MEMORY = MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=536870912
TORCHRUN = $(PY) -m torch.distributed.run
CPU_BENCHMARKS = cpu_attention cpu_decode cpu_dynamic_mask cpu_key_indices cpu_sweeps
# As in the build of PRESET=ci, so that ccache knows what that has compiled.
WHEEL_FLAGS = $(if $(filter ci,$(PRESET)),$(foreach option,CMAKE_COMPILE_WARNING_AS_ERROR=ON \
                  FLASH_DMATTN_FORBID_SPILLS=ON "CMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)",\
                  --config-settings=cmake.define.$(option)))

CHECK_PACKAGES = .venv-packaging/bin/python tools/check_package.py dist/* && \
                 .venv-packaging/bin/python -m twine check --strict dist/*

.PHONY: help setup setup-build library build run test test-cpp test-python test-notebooks test-sanitize fuzz lint format bench results \
        results-gpu figures check-neon check-wheel check-types check-pythons check-conan sdist wheels docs \
        check-docs release-check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup:  ## install what is missing: Debian packages, and the pinned Python packages into .venv
	@tools/setup.sh

setup-build:  ## the same, of Python packages only those that `make run` needs
	@tools/setup.sh build

library: setup-build  ## build the PyTorch library into python/flash_dmattn
	@$(CONFIGURE) --preset $(PRESET) -DPython_EXECUTABLE=$(PY)
	@cmake --build --preset $(PRESET) --target flash_dmattn_torch
	@cmake --install $(BUILD) --component python --prefix python >/dev/null

build: library  ## build everything, tests included
	@cmake --build --preset $(PRESET)

run: library  ## train a small language model and let it write (ARGS="--help")
	@$(PY) examples/train_language_model.py $(ARGS)

test: lint test-cpp test-python test-notebooks  ## all that this machine can test

test-cpp: build  ## the C++ tests
	@ctest --preset $(PRESET) --parallel $$(nproc)

test-python: setup library  ## the Python tests, also on the GPU if there is one (ARGS="-k name"; ARGS="-n 0": one process)
	@$(KEEP_MEMORY) $(PY) -m pytest tests -n 2 --dist loadfile $(ARGS)

test-notebooks: setup library  ## run the notebooks of docs/
	@$(PY) -m pytest --nbmake docs/notebooks --quiet

test-sanitize: setup  ## C++ tests under AddressSanitizer and UBSan; GPU tests, if there is one, under compute-sanitizer
	@$(CONFIGURE) --preset sanitize
	@cmake --build --preset sanitize
	@ctest --preset sanitize --parallel $$(nproc)
	@if nvidia-smi -L >/dev/null 2>&1; then $(MAKE) --no-print-directory build; fi
	@PY=$(PY) tools/sanitize_gpu.sh $(BUILD)

fuzz:  ## explore arguments and calls of the C++ library with libFuzzer (RUNS="1000000 200000 100000": of each)
	@tools/setup.sh fuzz
	@$(CONFIGURE) --preset fuzz
	@cmake --build --preset fuzz
	@$(call FUZZ,validate,512,1)
	@$(call FUZZ,selection,512,2)
	@$(call FUZZ,attention,64,3)

lint: setup  ## check formatting, style, that no include goes up the layers and that versions agree
	@clang-format --dry-run --Werror $(CPP_FILES)
	@ruff check --quiet .
	@ruff format --check --quiet .
	@$(PY) tools/check_layers.py
	@$(PY) tools/check_versions.py

format: setup  ## format C++ and Python, fix what ruff can fix
	@clang-format -i $(CPP_FILES)
	@ruff format .
	@ruff check --fix .

bench: library  ## compare speed and memory with PyTorch's attention (ARGS="--help")
	@$(PY) benchmarks/cpu_attention.py $(ARGS)

results: setup library  ## measure all that docs/ says of CPUs into benchmarks/results, then `make figures` (REPEATS=7)
	@mkdir -p benchmarks/results
	@for script in $(CPU_BENCHMARKS); do \
	  $(PY) benchmarks/$$script.py --repeats $(REPEATS) --json benchmarks/results || exit 1; \
	done
	@$(MAKE) --no-print-directory figures

results-gpu: setup build  ## the same on a GPU, and on several if there are several
	@mkdir -p benchmarks/results
	@$(PY) benchmarks/gpu_attention.py --repeats $(REPEATS) --json benchmarks/results
	@$(PY) benchmarks/gpu_doge.py --repeats $(REPEATS) --json benchmarks/results
	@cmake --build --preset $(PRESET) --target cuda_selection_benchmark
	@$(PY) benchmarks/gpu_selection.py $(BUILD)/cuda_selection_benchmark --json benchmarks/results
	@gpus=$$(nvidia-smi -L | wc -l); \
	if [[ $$gpus -gt 2 ]]; then \
	  $(TORCHRUN) --nproc-per-node 2 benchmarks/gpu_distributed.py --only exchange memory early \
	    --repeats $(REPEATS) --json benchmarks/results || exit 1; \
	fi; \
	if [[ $$gpus -ge 2 ]]; then \
	  $(TORCHRUN) --nproc-per-node $$gpus benchmarks/gpu_distributed.py \
	    --repeats $(REPEATS) --json benchmarks/results; \
	fi
	@$(MAKE) --no-print-directory figures

figures: setup  ## write the tables of README.md and docs/, and the plots of docs/images, from benchmarks/results
	@$(PY) benchmarks/tables.py
	@$(PY) benchmarks/plot.py benchmarks/results/*.json --out docs/images

check-neon:  ## cross-compile for 64-bit Arm and run the C++ tests in an emulator
	@tools/setup.sh neon
	@$(CONFIGURE) --preset neon
	@cmake --build --preset neon
	@ctest --preset neon --parallel $$(nproc)

check-wheel: setup  ## build the wheel as `pip install .` does, install it into build/wheel and use it there
	@rm -rf build/wheel && mkdir -p build/wheel
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation $(WHEEL_FLAGS) --wheel-dir build/wheel .
	@$(PY) -m pip install --quiet --no-deps --target build/wheel/site build/wheel/flash_dmattn-*.whl
	@cd build/wheel && PYTHONPATH=site $(PY) -m flash_dmattn info

sdist:  ## build the source distribution into dist/ and see that it has what it needs and nothing else
	@tools/setup.sh packaging
	@rm -rf dist && mkdir dist
	@.venv-packaging/bin/python -m build --sdist --no-isolation --skip-dependency-check --outdir dist . >/dev/null
	@$(CHECK_PACKAGES)

wheels: setup sdist  ## build wheels from it into dist/ (WHEELS="cpu cuda"; cuda takes ten minutes and more)
	@PYTHON=$(PY) CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)" tools/build_wheels.sh $(WHEELS) -- $(WHEEL_FLAGS)
	@$(CHECK_PACKAGES)

check-pythons:  ## test the CPU wheel of dist/ with other Pythons and versions of torch (PYTHONS="3.12" TORCHES="2.11.0")
	@tools/setup.sh packaging
	@tools/check_pythons.sh "$(PYTHONS)" "$(TORCHES)"

check-types: setup  ## what mypy and pyright, both strict, say of a client of the package
	@MYPYPATH=python $(PY) -m mypy --strict --follow-imports=silent --cache-dir build/mypy tests/typing/client.py
	@basedpyright --project tests/typing --pythonpath $(PY)

check-conan: setup  ## create the Conan package of the C++ library, both kinds, and build examples/cpp against it
	@tools/setup.sh packaging
	@CONAN=.venv-packaging/bin/conan tools/check_conan.sh

docs:  ## build the documentation site into build/site, every warning an error; needs no build of the library
	@tools/setup.sh docs
	@PATH=$(CURDIR)/.venv-docs/bin:$$PATH NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	@echo "python3 -m http.server --directory build/site 8000: search works on a served site only"

check-docs: docs  ## open every page of the site in Chromium: accessibility (axe), links, pictures, the console
	@tools/setup.sh check-docs
	@.venv-check-docs/bin/python tools/check_site.py

release-check:  ## all that a release has to pass (CONTRIBUTING.md): dates, a clean tree, what CI runs, packages, the site
	@python3 tools/check_versions.py --release
	@.ci/run
	@$(MAKE) --no-print-directory check-docs wheels check-conan
	@$(MAKE) --no-print-directory check-pythons

clean:  ## remove what was built, not the environments (.venv*)
	rm -rf build dist python/flash_dmattn/_C
