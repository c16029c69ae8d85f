# Every target stands alone: on a machine with Python >= 3.11, make and git it first makes its own environment.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PIP_EXTRA ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
BASE ?= HEAD
AOT_TRITONS ?= 3.6.0 3.7.1 3.9.0

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PIP_INSTALL = -m pip install --disable-pip-version-check $(PIP_EXTRA) -c constraints.txt
TORCH = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(shell grep '^torch==' constraints.txt)
TEST_ENV = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo demo-long test test-full test-clients lint docs bench bench-compare gpu aot-matrix build clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Variables:"
	@echo "  PYTHON=python3.12     interpreter for the environment (>= 3.11)"
	@echo "  VENV=.venv            where the environment lies"
	@echo "  TORCH_INDEX=URL       further package index for torch; on Linux the ordinary index serves the CUDA build, and"
	@echo "                        https://download.pytorch.org/whl/cpu the much smaller one for machines without a GPU"
	@echo "  PIP_EXTRA='...'       further options of every pip install, such as --find-links DIR"
	@echo "  PYTEST_ARGS='...'     further arguments of pytest, such as -k spade"
	@echo "  BENCH_ARGS='...'      further arguments of the benchmark, such as '--models spade led --lengths 1024'"
	@echo "  BASE=main             commit that bench-compare compares with; the last one if not given"
	@echo "  AOT_TRITONS='...'     versions of Triton that aot-matrix compiles with"

install: $(INSTALLED) ## Make the environment (every other target does so where needed)

# torch first and by itself, so that nothing else decides which build of it is taken
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "hf_hybrid needs Python >= 3.11, and '$(PYTHON)' is not: $$($(PYTHON) --version 2>&1 | head -1)" >&2; \
		echo "Name another one, such as: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -n "$(TORCH_INDEX)" || test "$$(uname -s)" != Linux || command -v nvidia-smi >/dev/null || \
		echo "No NVIDIA driver found: see TORCH_INDEX in 'make help' if a CUDA build of torch is about to be downloaded."
	$(PYTHON) -m venv $(VENV)
	$(PY) $(PIP_INSTALL) $(TORCH)
	$(PY) $(PIP_INSTALL) -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## Fine-tune the starter to summarize offline text, beside training from scratch, in minutes
	$(PY) -m hf_hybrid.training.demo

demo-long: $(INSTALLED) ## The same with longer documents and more steps, in less than an hour
	$(PY) -m hf_hybrid.training.demo --long

test: $(INSTALLED) ## Run the tests on two processes, without network
	$(TEST_ENV) $(PY) -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-full: $(INSTALLED) ## Run the tests with every matrix whole, as before a release
	$(TEST_ENV) $(PY) -m pytest -n 2 --dist worksteal -m 'full or not full' $(PYTEST_ARGS)

test-clients: ## Run real clients (TRL, Sentence Transformers, ...) with tiny models, in an environment of their own
	test -d $(VENV)-clients || $(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python $(PIP_INSTALL) $(TORCH)
	$(VENV)-clients/bin/python $(PIP_INSTALL) -e '.[dev,clients]'
	$(TEST_ENV) $(VENV)-clients/bin/python -m pytest -n 2 --dist worksteal tests/clients $(PYTEST_ARGS)

lint: $(INSTALLED) ## Check formatting, style, types and the structure of the model files
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/python .ci/lint_models.py

docs: $(INSTALLED) ## Build the documentation as web pages in build/docs; a warning is an error
	$(PY) -m sphinx -W --keep-going -q -d build/doctrees docs build/docs

bench: $(INSTALLED) ## Measure the models against named peers on the CPU, in about forty minutes on two cores
	$(PY) -m benchmarks.bench_models $(BENCH_ARGS)

bench-compare: $(INSTALLED) ## Compare speed and memory of the working tree with those of the commit BASE, in one run
	$(PY) -m benchmarks.bench_compare --base $(BASE) $(BENCH_ARGS)

gpu: ## Check, tune and time on a GPU, nine minutes a call, again until done; results in runs/gpu
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m benchmarks.gpu $(BENCH_ARGS)

# torch's CUDA build asks for one version of triton, so the others go in behind its back
aot-matrix: ## Compile the Triton kernels for GPUs that are not there, under several versions of Triton
	@set -e; for version in $(AOT_TRITONS); do \
		$(PYTHON) -m venv build/aot-$$version; \
		build/aot-$$version/bin/python $(PIP_INSTALL) $(TORCH) numpy; \
		build/aot-$$version/bin/python -m pip install --disable-pip-version-check $(PIP_EXTRA) --no-deps triton==$$version; \
		build/aot-$$version/bin/python -m benchmarks.aot --output benchmarks/results/aot || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "A limit is broken under:$$failed" >&2; exit 1; }

build: $(INSTALLED) ## Build the wheel and sdist, and import every module of the wheel in a clean environment
	rm -rf dist build
	$(PY) -m build
	$(PYTHON) -m venv build/wheel-check
	build/wheel-check/bin/python $(PIP_INSTALL) $(TORCH)
	build/wheel-check/bin/python $(PIP_INSTALL) dist/*.whl
	cd build/wheel-check && bin/python -c "$$IMPORT_EVERY_MODULE" && bin/hf-hybrid --version && bin/hf-hybrid doctor
	rm -rf build/wheel-check

define IMPORT_EVERY_MODULE
import importlib, pkgutil
import hf_hybrid
names = [module.name for module in pkgutil.walk_packages(hf_hybrid.__path__, 'hf_hybrid.')]
names = [name for name in names if not name.endswith('.triton_kernels')]  # triton is there on Linux only
for name in names:
    importlib.import_module(name)
print(f'hf_hybrid {hf_hybrid.__version__}: {len(names)} modules import from {hf_hybrid.__path__[0]}')
endef
export IMPORT_EVERY_MODULE

clean: ## Remove build outputs and caches (the environment stays; remove it with rm -r .venv)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
