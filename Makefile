# Everything starts from a fresh clone: each target makes the virtual environment first where it is missing or old.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PEERS := .venv-peers
CLIENTS := .venv-clients
NPM := $(VENV)/npm
# pip's isolated build of this package must use the pins too; old and new pip look for them under these two names
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip
# tests run in two processes; one thread each is fastest, the models being tiny
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
QUICK := tests/config tests/model tests/test_reader.py tests/training/test_step.py tests/training/test_trainer.py \
  tests/training/test_resume.py

.PHONY: help setup demo test clients docs lint quick check bench golden speed sanitize wheel clean

help:
	@echo "make demo    train on the source of Python's standard library, evaluate, generate; report in runs/demo"
	@echo "make test    all tests"
	@echo "make clients openai, LangChain, lm_eval, minicons, ... against our server and exported models, in $(CLIENTS)"
	@echo "make docs    the documentation site, in site/index.html"
	@echo "make quick   format, lint, types, and the tests of settings, model, reader and a training step, for every change"
	@echo "make check   format, lint, types, documentation and tests: what must pass before a change"
	@echo "make bench   speed and memory beside other implementations, in .venv-peers; results in benchmarks/results"
	@echo "make golden  compare exact numbers with those of benchmarks/golden, which an earlier commit gave"
	@echo "make speed   speed and memory of the working tree beside the last tag; make speed BASE=COMMIT HEAD=COMMIT"
	@echo "make sanitize  the native operators under address, undefined-behaviour and thread sanitizers of g++ (10 to 20 min)"
	@echo "make wheel   the source distribution and the wheels, one of which has the native operators, in dist/"
	@echo "make setup   only the virtual environment in $(VENV), which the others make where needed"
	@echo "make clean   delete the virtual environments and caches (runs/ stays)"

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/txl demo

test: $(STAMP)
	$(PYTEST)

# openai 3 is in the first environment, openai 2 and all others in the second; what they warn of is theirs
clients: $(STAMP) $(CLIENTS)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -W ignore tests/clients/test_openai.py -k 'not node'
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -W ignore tests/clients

docs: $(STAMP)
	$(BIN)/python docs/build.py

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	@if [ -x $(NPM)/node_modules/.bin/tsc ]; then $(NPM)/node_modules/.bin/tsc -p tests/apps/serve/jsconfig.json; \
	  else echo "types of the server's page: not checked, for which setup needs Node and npm"; fi

quick: lint
	$(PYTEST) $(QUICK)

check: lint
	$(BIN)/python docs/build.py
	$(PYTEST)

bench: $(STAMP) $(PEERS)/installed
	$(BIN)/python benchmarks/training.py --peers $(PEERS)/bin/python
	$(BIN)/python benchmarks/inference.py --peers $(PEERS)/bin/python
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/chart.py

golden: $(STAMP)
	$(BIN)/python benchmarks/golden.py

speed: $(STAMP)
	$(BIN)/python benchmarks/speed.py $(BASE) $(HEAD)

wheel: $(STAMP)
	$(BIN)/python -m hatchling build
	TXL_NATIVE_WHEEL=1 $(BIN)/python -m hatchling build -t wheel

sanitize: $(STAMP)
	$(BIN)/python tests/sanitize/sanitize.py

clean:
	rm -rf $(VENV) $(PEERS) $(CLIENTS) site .cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks docs examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Written last, so that an interrupted setup is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; '$(PYTHON)' is older or not there. Name another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@echo "setup: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: packages (the first time some hundred MB, a few minutes)"
	@$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@echo "setup: native operators (about a minute)"
	@$(BIN)/txl info --build-native > /dev/null || echo "setup: without native operators, which only make a CPU faster"
	@if command -v npm > /dev/null; then npm install --prefix $(NPM) --no-audit --no-fund --silent typescript@5.9.3 \
	  axe-core@4.14.1 || echo "setup: without the tools that check the server's page"; fi
	@touch $@
	@echo "setup: done"

# The other implementations need older packages than ours, so they have an environment of their own.
$(PEERS)/installed: benchmarks/peers.txt
	@echo "bench: other implementations in $(PEERS)"
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install -qq -r benchmarks/peers.txt
	@touch $@

# Clients are installed with our constraints, except for what they need in another version.
$(CLIENTS)/installed: pyproject.toml constraints.txt tests/clients/requirements.txt tests/clients/package.json
	@echo "clients: programs of our users in $(CLIENTS) (2 GB, some minutes)"
	@$(PYTHON) -m venv $(CLIENTS)
	@grep -vE '^(certifi|openai|plotext)==' constraints.txt > $(CLIENTS)/constraints.txt
	@PIP_CONSTRAINT=$(CLIENTS)/constraints.txt PIP_BUILD_CONSTRAINT=$(CLIENTS)/constraints.txt $(CLIENTS)/bin/python \
	  -m pip install -qq -r tests/clients/requirements.txt -e '.[lm-eval,lora,serve,transformers]'
	@if command -v node > /dev/null && command -v npm > /dev/null; then cp tests/clients/package.json $(CLIENTS) \
	  && npm install --prefix $(CLIENTS) --no-audit --no-fund --silent; fi
	@touch $@
