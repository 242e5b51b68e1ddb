# Two commands do all the set-up on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/ready
TESTED := $(VENV)/ready-for-tests
PICTURES := $(VENV)/ready-for-pictures
FLOWER := $(VENV)/ready-for-federations

.PHONY: demo federation test test-long test-federation lint bench learn results clean

demo: $(READY)
	$(VENV)/bin/polyfed run fedproto --rounds 15

# Three organisations and a server on this machine, with keys and TLS
federation: $(FLOWER)
	$(VENV)/bin/python examples/federation/demo.py $(or $(ARGS),runs/federation)

# Two halves at once, one per core: about the same time each
HALF := tests/engines tests/faults tests/federation tests/flower
test: $(TESTED)
	@$(VENV)/bin/python -m pytest $(HALF) > $(VENV)/first-half.txt 2>&1 & first=$$!; trap "kill $$first" INT TERM; \
	$(VENV)/bin/python -m pytest $(HALF:%=--ignore=%); second=$$?; \
	wait $$first; first=$$?; cat $(VENV)/first-half.txt; [ $$first = 0 ] && [ $$second = 0 ]

# What takes minutes: kills and power cuts at every file operation, ten thousand mutated replies
test-long: $(TESTED)
	$(VENV)/bin/python -m pytest -m long

# Servers and sites as real processes: killed, stopped, slow, away
test-federation: $(TESTED)
	$(VENV)/bin/python -m pytest -m federation

lint: $(TESTED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(READY)
	$(VENV)/bin/python benchmarks/cpu_round.py

# Whether methods learn; others and options go through ARGS: make learn ARGS="standalone fedtgp --out runs/fedtgp"
learn: $(PICTURES)
	$(VENV)/bin/polyfed compare $(or $(ARGS),standalone fedproto --seeds 0-2 --rounds 5 --out runs/learn)

# docs/results.md and its pictures, from the records in papers/results and the published numbers
results: $(PICTURES)
	$(VENV)/bin/python -m papers.page

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "polyfed needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable .
	@touch $@

$(TESTED): pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev,flower,ray,tune,pictures,report,onnx,tensorboard]'
	@touch $@ $(READY)

$(PICTURES): pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable '.[pictures]'
	@touch $@ $(READY)

$(FLOWER): pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable '.[flower]'
	@touch $@ $(READY)
