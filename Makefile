# Everything sets itself up: a fresh clone needs python3 (3.11 or newer), make and a package registry.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet
export OMP_NUM_THREADS ?= 1
# The tests start thousands of short processes: compiled once, not in each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint types contracts unit e2e bench bench-checkpoint bench-trust peers accept clean
help:
	@echo "make demo    a training run survives five injected faults, bit for bit (under 5 minutes after installing)"
	@echo "make test    lint, types, contracts, docs, logic (under 15 minutes on 2 cores)"
	@echo "make e2e     a real Slurm cluster of three nodes, a real Kubernetes API, real databases of metrics, a real browser; needs root on Debian 12 (20 minutes on 2 cores, the first time 4 more)"
	@echo "make accept  the figures the project promises, measured here"
	@echo "make bench   side by side with other launchers"
	@echo "make bench-checkpoint   what checkpoints cost, beside other libraries (12 minutes on 2 quiet cores)"
	@echo "make bench-trust        damage and crashes: what each format makes of them (8 minutes on 2 quiet cores)"
	@echo "make lint    ruff only"

# A stamp per set of extras; the Makefile names the sets, so that a changed one re-installs.
$(VENV)/.venv-made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "midwatch needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not sys.platform.startswith("linux"))' || { echo "midwatch runs on Linux only"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch-installed: $(VENV)/.venv-made pyproject.toml constraints.txt
	@echo "installing midwatch and PyTorch into $(VENV) (a few minutes the first time)"
	$(PIP) -c constraints.txt -e '.[torch]'
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.torch-installed Makefile
	@echo "installing the development tools into $(VENV)"
	$(PIP) -c constraints.txt -e '.[torch,dev,sign]'
	@touch $@

$(VENV)/.e2e-installed: $(VENV)/.dev-installed Makefile
	@echo "installing what the end-to-end tests need into $(VENV)"
	$(PIP) -c constraints.txt -e '.[torch,dev,sign,e2e,alerts,k8s,wandb,mlflow,trackio]'
	@touch $@

demo: $(VENV)/.torch-installed
	$(BIN)/midwatch demo

test: lint types contracts unit

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-installed
	$(BIN)/pyright

contracts: $(VENV)/.dev-installed
	$(BIN)/lint-imports

# Two at a time: most tests that start processes wait more than they work, and none needs the machine for itself.
unit: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not stress and not gpu and not e2e"

e2e: $(VENV)/.e2e-installed
	$(BIN)/python -m pytest -m e2e tests/e2e

accept: $(VENV)/.dev-installed
	$(BIN)/python bench/accept.py

bench: $(VENV)/.dev-installed
	$(BIN)/python bench/faults.py compare

# What the checkpoint benchmarks compare with: in a folder of their own, without dependencies, so that PyTorch stays.
peers: $(VENV)/.dev-installed
	$(BIN)/python bench/peers.py

bench-checkpoint: peers
	$(BIN)/python bench/checkpoint.py

bench-trust: peers
	$(BIN)/python bench/trust.py

clean:
	rm -rf $(VENV) build dist demo-out bench/out
