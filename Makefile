# make demo         UEFL and FedAvg on real digits, with pictures, in runs/demo
# make test         the tests without the slow ones
# make test-slow    the slow tests: other instruction sets, nvcc, wheels, long runs
# make test-flower  the tests of clients in separate processes, over Flower
# make test-peers   other libraries' tests on our layers and estimators; writes the tables of docs/peers.md
# make test-large   what needs 14 GB of memory, or an hour
# make chaos        breaks a deployed federation in many ways and prints the outcome
# make lint         style, types, C++ format
# make bench        the benchmark suite against its peers
# make bench-plot   pictures of the saved results of the suite
# make ctest        C++ tests, without torch
# make ctest-arm64  the same under qemu; needs g++-aarch64-linux-gnu and qemu-user-static
# make ctest-slow   a million rows for each search on CUDA, emulated
# make wheel        dist/*.whl as it is published
# make docs         the documentation, in build/site
# make gpu-check    on a GPU machine: every kernel once, its tests, timings
# make clean        removes what was built
#
# Every target except docs and gpu-check (which runs on a bare machine) first does its set-up: .venv, pinned
# packages, kernels.

LEAST := $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)
PYTHON ?= $(shell command -v python$(LEAST) || command -v python3)
PY := .venv/bin/python
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
export UEFL_REQUIRE_KERNELS ?= 1# a compiler that fails is an error here, not a warning
export PYTHONDONTWRITEBYTECODE :=# otherwise every process compiles every module again, and pytest every test
# CUDA kernels for the GPUs of this machine; `make setup CMAKE_ARGS=` compiles the kernels of a wheel
export CMAKE_ARGS ?= -DUEFL_CUDA=LOCAL

.PHONY: setup demo test test-slow test-flower test-peers test-large chaos lint bench bench-plot bench-smoke ctest \
  ctest-slow ctest-arm64 wheel docs gpu-check clean
.DELETE_ON_ERROR:

setup: .venv/.built

.venv/.tools:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v[:2] < tuple(map(int, "$(LEAST)".split("."))) and "uefl needs Python $(LEAST) or newer, %s is %d.%d; name another one: make PYTHON=..." % (sys.executable, v[0], v[1]))'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(INSTALL) -c requirements.txt cmake ninja || { $(NO_PACKAGES); }
	@touch $@

.venv/.packages: requirements.txt .venv/.tools
	@echo "Downloading about 3 GB, mostly CUDA libraries of PyTorch. They take 5 GB in .venv."
	$(INSTALL) -r requirements.txt || { $(NO_PACKAGES); }
	@touch $@

# A module is compiled to bytecode when it is first imported; most never are.
INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check --no-compile

# The most likely cause when pip fails.
NO_PACKAGES = echo "uefl: pip could not install the packages; without a network, set PIP_FIND_LINKS to a folder with their wheels" >&2; exit 1

SOURCES := setup.py CMakeLists.txt pyproject.toml $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)
CONFIGURE = .venv/bin/cmake -S . -GNinja "-DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja"

# The kernels need no torch: the first time they are compiled while torch is downloaded. setup.py reports
# failures.
build/kernels/CMakeCache.txt: | .venv/.tools
	@($(CONFIGURE) -B build/kernels -DUEFL_TORCH=OFF && .venv/bin/cmake --build build/kernels --target uefl_cpu) >/dev/null 2>&1 || true

.venv/.built: requirements.txt $(SOURCES)
	@$(MAKE) --no-print-directory --jobs 2 .venv/.packages build/kernels/CMakeCache.txt
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

demo: setup
	@if [ -f runs/demo/config.toml ]; then .venv/bin/uefl train --resume runs/demo; else .venv/bin/uefl train demo --out runs/demo; fi

# A process on each core: most tests keep one core busy. Slow tests that compile, or start processes, on all
# cores come after the others.
test: setup
	$(PY) -m pytest -n auto --maxprocesses 8 --dist loadfile --benchmark-disable -m 'not slow and not large'

test-slow: setup
	$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal --benchmark-disable -m 'slow and not large and not all_cores'
	$(PY) -m pytest -m 'slow and all_cores and not large' $$(grep -rl all_cores --include='test_*.py' tests)

# Flower wants older versions of some packages: it comes first on the path, only in its own tests. They run
# on the oldest and on the newest version.
FLOWER_TESTS = $(PY) -m pytest -n auto --maxprocesses 8 --dist loadfile --benchmark-disable $$(grep -l flwr tests/federated/engines/test_*.py tests/federated/deploy/test_*.py)
test-flower: setup build/flower/.installed build/flower-newest/.installed
	PYTHONPATH="$(CURDIR)/build/flower:$(CURDIR)" $(FLOWER_TESTS) -m 'not large'
	PYTHONPATH="$(CURDIR)/build/flower-newest:$(CURDIR)" $(FLOWER_TESTS) -m 'not large and not slow'

test-large: setup build/flower/.installed
	PYTHONPATH="$(CURDIR)/build/flower:$(CURDIR)" $(PY) -m pytest --benchmark-disable --timeout 3600 -m large $$(grep -rl mark.large --include='test_*.py' tests)

# Plays every fault with real processes and writes docs/faults.md; `make chaos FAULTS="nan server"` plays two
# and writes nothing.
chaos: setup build/flower/.installed
	PYTHONPATH="$(CURDIR)/build/flower:$(CURDIR)" $(PY) -m tests.federated.deploy.chaos $(FAULTS)

# The tests of vector-quantize-pytorch are in its repository only; UEFL_VQ_TESTS names a checkout of it.
PEER = https://github.com/lucidrains/vector-quantize-pytorch/archive/0d7d1aa83334b6f2f8a40306bece75cdaa13d065.tar.gz
WITH_PEERS = PYTHONPATH="$(CURDIR)/build/peers:$(CURDIR)" $(PY)
test-peers: setup build/peers/.installed $(if $(UEFL_VQ_TESTS),,build/peer-tests.tar.gz)
	$(WITH_PEERS) -m tests.peers.peer_tables $(or $(UEFL_VQ_TESTS),build/peer-tests.tar.gz)
	$(WITH_PEERS) -m pytest -n auto --maxprocesses 8 --benchmark-disable tests/peers/test_codecs.py \
	  tests/kernels/test_nn_peer*.py tests/kernels/test_nn_wrappers.py

build/peer-tests.tar.gz:
	@$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --dest build/peer-tests "vector-quantize-pytorch @ $(PEER)" 2>/dev/null \
	  || { echo "uefl: github.com cannot be reached; name a checkout of vector-quantize-pytorch: make test-peers UEFL_VQ_TESTS=PATH" >&2; exit 1; }
	@mv build/peer-tests/*.tar.gz $@

build/flower/.installed build/flower-newest/.installed build/peers/.installed: build/%/.installed: requirements-%.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/$* -r $<
	@touch $@

lint: .venv/.packages
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' \
	  'tests/cpp/*.cpp' 'tests/cpp/*.h' 'benchmarks/*.cpp' 'benchmarks/*.h' 'benchmarks/*.cu')
	.venv/bin/mypy

# The tests share the objects of the package.
ctest: .venv/.packages
	$(CONFIGURE) -B build/kernels -DPython3_EXECUTABLE=$(CURDIR)/$(PY) $(CMAKE_ARGS) -DUEFL_EMULATE_AMX=AUTO
	.venv/bin/cmake --build build/kernels --target cpp_tests
	.venv/bin/ctest --test-dir build/kernels --output-on-failure --parallel $(CMAKE_BUILD_PARALLEL_LEVEL)

ctest-slow: ctest
	.venv/bin/ctest --test-dir build/kernels --output-on-failure --parallel $(CMAKE_BUILD_PARALLEL_LEVEL) -C Slow -L slow

ctest-arm64: .venv/.packages
	$(CONFIGURE) -B build/ctest-arm64 -DUEFL_TORCH=OFF \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64-static;-L;/usr/aarch64-linux-gnu"
	.venv/bin/cmake --build build/ctest-arm64 --target cpp_tests
	.venv/bin/ctest --test-dir build/ctest-arm64 --output-on-failure

bench: setup
	$(PY) -m benchmarks.run
	-for work in kmeans layer demo; do $(PY) -m benchmarks.two_runs $$work; done

bench-plot: .venv/.packages
	$(PY) -m benchmarks.roofline

bench-smoke: setup
	$(PY) -m benchmarks.run --smoke

wheel: .venv/.packages
	CMAKE_ARGS=-DUEFL_CUDA=AUTO $(PY) tools/wheel.py build dist
	for wheel in dist/*.whl; do $(PY) tools/wheel.py check $$wheel || exit 1; done

docs: build/docs-venv/.packages
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict --site-dir build/site

build/docs-venv/.packages: docs/requirements.txt
	test -x build/docs-venv/bin/python || $(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

gpu-check:
	bash benchmarks/gpu_check.sh

clean:
	rm -rf build dist .venv/.built uefl_kernels/*.so *.egg-info
