# Two commands on a fresh machine: `make serve` and `make test`. Each makes its own environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=
FLAGS ?=
SOURCES := bench core demo frontend gpu_worker ipc kernels
# A folder's time stamp changes when a file in it comes or goes: then the editable install is made again.
FOLDERS := $(shell find $(SOURCES) -type d -not -name __pycache__)

.PHONY: serve test check docs format clean
.DEFAULT_GOAL := serve

$(VENV)/.made: pyproject.toml constraints.txt $(FOLDERS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]' --config-settings editable_mode=strict
	touch $@

serve: $(VENV)/.made  ## Serve the demo model, or MODEL=folder
	$(BIN)/penstock serve $(MODEL) $(FLAGS)

test: $(VENV)/.made  ## Run the tests
	$(BIN)/python -m pytest $(FLAGS)

check: $(VENV)/.made  ## Format, lint and type checks; the documentation builds
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES:%=-p penstock.%)
	$(BIN)/mypy tests docs
	$(BIN)/python docs/options_page.py --check
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs

docs: $(VENV)/.made  ## Build the documentation into build/docs
	$(BIN)/python docs/options_page.py
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs
	@echo "open build/docs/index.html"

format: $(VENV)/.made  ## Format, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove what the other targets made
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
