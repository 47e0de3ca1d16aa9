# Needs Python 3.11+ and make; everything else is installed into .venv (the browser of a test by apt-get, where that is root's).
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BINDINGS := .venv/bindings/.fetched

.PHONY: venv browser demo test lint peers clean

venv: $(STAMP)

$(STAMP): requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found %d.%d; run: make PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

# TensorRT's Python bindings, which one test runs the engine code with. Without an index that test is skipped, and says so.
$(BINDINGS): tests/data/tensorrt_api/bindings.lock $(STAMP)
	$(BIN)/python tests/fetch_bindings.py .venv/bindings && touch $(BINDINGS) || true

demo: venv
	mkdir -p build
	$(BIN)/pom-export demos/digits/model.pt --out build/digits.pom --overwrite
	$(BIN)/python demos/digits/run.py build/digits.pom
	$(BIN)/pom-export demos/text/model.pt --form recurrent --out build/text.pom --overwrite
	$(BIN)/python demos/text/run.py build/text.pom

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

browser:
	@sh tests/install_browser.sh

test: lint browser $(BINDINGS)
	$(BIN)/pytest

# Other runtimes to compare with (2 GB): .venv-peers/bin/python -m benchmarks.peers
peers: requirements-peers.lock
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements-peers.lock

clean:
	rm -rf .venv .venv-peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
