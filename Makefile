# `make demo` and `make test` set everything up by themselves, in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-flower test-gpu setup format clean

demo: setup
	$(BIN)/fedsieve run

test: setup
	$(BIN)/ruff format --check src tests results
	$(BIN)/ruff check src tests results
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m 'not processes' --cov --cov-report=term:skip-covered --cov-fail-under=90

# Federations on Flower, many of them with a SuperLink and SuperNodes of their own; they wait a lot, so two at once.
test-flower: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m flower -n 2 --dist loadfile --no-loadscope-reorder --durations=12 tests/flower

# On a machine with a CUDA device; PYTHON may be any interpreter that has torch for it.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu tests

setup: .venv/.complete

.venv/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,flower]'
	touch $@

format: setup
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info
