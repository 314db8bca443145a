# `make demo` and `make test` each work as the first command in a fresh clone: they set up .venv by themselves.

PYTHON ?= python3
# Another torch than that of constraints.txt, in an environment of its own: make test TORCH=2.15
TORCH ?=
VENV ?= .venv$(TORCH:%=-%)
PIP_ARGS ?=
PYTEST_ARGS ?=
# How many processes share the tests; each starts more by itself.
WORKERS ?= 2
BENCH_ARGS ?= codecs
DEMO_ARGS ?=
MATRIX_ARGS ?=
GPU_ARGS ?=
# How many seeds the demo trains with.
SEEDS ?= 1
# How long `make drawn` looks for a configuration that breaks a law.
DRAWN_SECONDS ?= 1800

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Another torch brings another NVRTC.
CONSTRAINTS := $(if $(TORCH),$(VENV)/)constraints.txt
# The folders are the package `gradwire` only once they are installed, so mypy reads them through a link of that name.
LINK := $(VENV)/mypy/gradwire
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal
HELPERS := examples/plugins:tests/support:tests/compress:tests/core:tests/cuda:tests/ddp:tests/exchanges:tests/horovod:tests/project
TYPED := $(addprefix $(LINK)/,__init__.py meet.py plugin.py benchmarks compress csrc hooks optim trainers) tests

.PHONY: help demo test test-all soak drawn lint types docs matrix bench benchmarks gpu-report clean

help:
	@echo 'make demo        train a small model on two processes, dense and with what is'
	@echo '                 recommended (SEEDS=$(SEEDS))'
	@echo 'make test        lint, types and the quick tests (PYTEST_ARGS="-k topk"); with'
	@echo '                 TORCH=2.15 the tests, on that torch'
	@echo 'make test-all    the slow tests too'
	@echo 'make soak        ranks killed, stopped and delayed, processes ended by the'
	@echo '                 hundred: an hour or so'
	@echo 'make drawn       training scripts drawn for $(DRAWN_SECONDS) seconds (DRAWN_SECONDS=7200),'
	@echo '                 and what breaks a law'
	@echo 'make lint        ruff and mypy alone; make types: mypy'
	@echo 'make docs        the pages of docs/ as a site, in site/'
	@echo 'make matrix      sdist and wheel, installed and run with each Python and'
	@echo '                 torch that can be had (MATRIX_ARGS=--help)'
	@echo 'make bench       gradwire-bench $(BENCH_ARGS)'
	@echo 'make benchmarks  regenerate every figure of docs/tables-*.md: hours, on a'
	@echo '                 machine that does nothing else'
	@echo 'make gpu-report  test, check and time the CUDA kernels on this machine’s GPU'
	@echo 'make clean       remove .venv and everything that was built'

demo: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node 2 \
		-m gradwire.benchmarks.learning.demo --seeds $(SEEDS) $(DEMO_ARGS)

# mypy goes by the types of one torch.
test: $(if $(TORCH),$(INSTALLED),lint)
	$(PYTEST) -m 'not slow and not soak and not cuda' $(PYTEST_ARGS)

test-all: $(if $(TORCH),$(INSTALLED),lint)
	$(PYTEST) -m 'not soak and not cuda' $(PYTEST_ARGS)

soak: $(INSTALLED)
	$(BIN)/python -m pytest -q -m soak $(PYTEST_ARGS)

drawn: $(INSTALLED)
	GRADWIRE_DRAWN_SECONDS=$(DRAWN_SECONDS) $(BIN)/python -m pytest -q -s tests/core/test_drawn.py \
		tests/horovod/test_horovod_drawn.py $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types

types: $(INSTALLED)
	MYPYPATH=$(VENV)/mypy:$(HELPERS) $(BIN)/mypy --explicit-package-bases $(TYPED)

# Not quietly: with --quiet, mkdocs drops the warnings that --strict would count.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

matrix:
	$(PYTHON) .ci/matrix.py --pip-args='$(PIP_ARGS)' $(MATRIX_ARGS)

bench: $(INSTALLED)
	$(BIN)/gradwire-bench $(BENCH_ARGS)

benchmarks: $(INSTALLED)
	$(BIN)/gradwire-bench publish

# Installs nothing: takes the Python whose torch and CuPy are set up for the GPU, and the package through a link.
gpu-report:
	mkdir -p .gpu && ln -sfn "$(CURDIR)" .gpu/gradwire
	PYTHONPATH="$(CURDIR)/.gpu:$$PYTHONPATH" $(PYTHON) -m gradwire.benchmarks.cli gpu $(GPU_ARGS)

clean:
	rm -rf $(VENV) .venv-* .editable .gpu .matrix build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment for everything: demo, tests and benchmarks. Installed again when the dependencies change. pip compiles
# modules on one core; compileall takes them all, and may fail at files that no Python reads.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed -E '/^(torch|nvidia-cuda-nvrtc)==/d' constraints.txt > $(CONSTRAINTS))
	@echo 'pip installs torch and what tests, pages and trainers need into $(VENV): 1 to 10 minutes, most of it download'
	$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) \
		$(TORCH:%='torch==%.*') -e '.[bench,docs,test,lightning,accelerate,transformers]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests/|/torch/testing/_internal/' $(VENV)/lib || true
	mkdir -p $(VENV)/mypy && ln -sfn "$(CURDIR)" $(LINK)
	touch $@
