# `make demo` and `make test` need Python 3.11+, git and make; everything else goes into .venv.
PYTHON ?= python3
VENV ?= .venv
# torch and torchvision come first and together: a later install then finds them and leaves them alone.
# For another build: make demo TORCH="torch torchvision --index-url …"
TORCH ?= torch torchvision
# Tests run in as many processes as there are cores, each on a core of its own.
PYTEST_WORKERS ?= auto
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint types format docs clean

demo: $(VENV)/.installed
	$(BIN)/moco demo

test: $(VENV)/.installed-dev lint types
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build -E -W --keep-going -b html docs docs/_build/html

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moco needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --editable '.[docs]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
