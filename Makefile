# The README's two commands are `make demo` and `make test`; both set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check bench soak proto clean

demo: $(VENV)/.demo-ready
	@$(BIN)/python examples/first_minute/demo.py

test: $(VENV)/.test-ready check
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/.test-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench:
	@$(PYTHON) benchmarks/run.py

# Hundreds of real runs while everything that can be killed is killed; prints what it checked.
soak: $(VENV)/.test-ready
	@$(BIN)/python tests/integration/fault_harness.py

# No stubs are generated: both sides build their calls from the descriptor (trn.proto.methods).
proto: $(VENV)/.test-ready
	$(BIN)/python -m grpc_tools.protoc -Itrn/proto=proto --python_out=src --pyi_out=src trn/proto/trainer.proto

clean:
	rm -rf $(VENV) .venv-bench build dist demo-runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Each stamp stands for one set of installed packages; it is redone when the pins or the metadata change.
$(VENV)/.demo-ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV) (once)…"
	@$(PIP_INSTALL) --editable '.[torch]'
	@touch $@

$(VENV)/.test-ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV) (once)…"
	@$(PIP_INSTALL) --editable '.[torch,dev]'
	@touch $@ $(VENV)/.demo-ready
