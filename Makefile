# The README's two commands are `make demo` and `make test`; both set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check bench soak soak-long soak-serving proto web test-web clean redis-server chromium wrk qt-libraries

demo: $(VENV)/.demo-ready
	@$(BIN)/python examples/first_minute/demo.py

test: $(VENV)/.test-ready check test-web redis-server chromium qt-libraries
	@$(BIN)/python -m compileall -q src  # tests start hundreds of interpreters, some of which may not write bytecode
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The event bus is tested against a real Redis, the page in a real browser; wrk loads servers in benchmarks. They are installed where that may be done, and
# not started as a service; without them those tests are skipped, and say so.
redis-server chromium wrk:
	@command -v $@ >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
		$(APT_INSTALL) $@ >/dev/null 2>&1 || { timeout 120 apt-get update -qq && $(APT_INSTALL) $@; } >/dev/null 2>&1 || true
	@command -v $@ >/dev/null || echo "There is no $@: tests of $(TESTED_WITH.$@) are skipped."

# What Qt needs of the system; a window without a screen needs no more.
QT_LIBRARIES := libegl1 libgl1 libxkbcommon0 libdbus-1-3 libfontconfig1 libglib2.0-0
HAS_QT = $(BIN)/python -c "import PySide6.QtWidgets" 2>/dev/null
qt-libraries: $(VENV)/.test-ready
	@$(HAS_QT) || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
		$(APT_INSTALL) $(QT_LIBRARIES) >/dev/null 2>&1 || \
		{ timeout 120 apt-get update -qq && $(APT_INSTALL) $(QT_LIBRARIES); } >/dev/null 2>&1 || true
	@$(HAS_QT) || echo "Qt cannot be loaded here: tests of the desktop window are skipped."

APT_INSTALL = RUNLEVEL=1 SYSTEMD_OFFLINE=1 DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -yqq --no-install-recommends
TESTED_WITH.redis-server := the event bus
TESTED_WITH.chromium := the page in a browser
TESTED_WITH.wrk := model servers under load

check: $(VENV)/.test-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: wrk
	@$(PYTHON) benchmarks/run.py

# Hundreds of real runs while everything that can fail is made to fail; prints what it checked and what struck.
soak: $(VENV)/.test-ready
	@$(BIN)/python tests/integration/fault_harness.py

# The same for about half an hour, with at least 500 kills of daemons and of workers; its report is part of the docs.
soak-long: $(VENV)/.test-ready
	@$(BIN)/python tests/integration/fault_harness.py --long --report docs/soak-report.md

# A model server for 10 minutes: swaps, kills, clients that are slow, gone or send rows that do harm. Its report is part of the docs.
soak-serving: $(VENV)/.test-ready
	@$(BIN)/python tests/integration/serving_harness.py --long --report docs/soak-serving-report.md

# No stubs are generated: both sides build their calls from the descriptor (trn.proto.methods).
proto: $(VENV)/.test-ready
	$(BIN)/python -m grpc_tools.protoc -Itrn/proto=proto --python_out=src --pyi_out=src trn/proto/trainer.proto

# The page is TypeScript in web/. It is built into src/trn/gateway/static/ and committed: users need no Node.
HAS_NODE = command -v npm >/dev/null && node -e \
	'const [a, b] = process.versions.node.split("."); process.exit(a > 22 || (a == 22 && b >= 12) || (a == 20 && b >= 19) ? 0 : 1)'
web:
	@$(HAS_NODE) || { echo "There is no Node of 20.19, 22.12 or newer, with npm: make web needs it."; exit 1; }
	@$(MAKE) --no-print-directory web/node_modules/.ready
	@cd web && npm run --silent build

test-web:
	@if ! { $(HAS_NODE); }; then echo "There is no Node of 20.19, 22.12 or newer: the page's own tests are skipped."; \
	elif ! $(MAKE) -s web/node_modules/.ready >/dev/null 2>&1; then \
		echo "The npm packages cannot be fetched: the page's own tests are skipped."; \
	else cd web && npm run --silent check && npm run --silent test; fi

web/node_modules/.ready: web/package.json web/package-lock.json
	@cd web && timeout 300 npm ci --silent --ignore-scripts --fetch-retries=1 --fetch-timeout=30000
	@touch $@

clean:
	@test ! -d demo-runs/home || ! test -x $(BIN)/trn || $(BIN)/trn --home demo-runs/home daemon stop >/dev/null 2>&1 || true
	rm -rf $(VENV) .venv-bench .venv-bench-apart build dist web/node_modules demo-runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
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
