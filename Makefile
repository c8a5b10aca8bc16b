# Everything runs from here. `make help` lists the targets; both `make demo` and `make test` set up all that they need.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps

RUST_SOURCES := Cargo.toml $(wildcard Cargo.lock) $(shell find rust -name target -prune -o \( -name '*.rs' -o -name Cargo.toml \) -print 2>/dev/null)
MATURIN := env -u CONDA_PREFIX VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/maturin

# uv installs torch in seconds; plain pip does the same work in minutes, and is used where uv itself cannot be installed.
HAS_UV = [ -x $(VENV)/bin/uv ]
UV_PIP = $(VENV)/bin/uv pip install --python $(PY)
PIP = $(PY) -m pip install --disable-pip-version-check

FUZZ_SECONDS ?= 60

export HF_HUB_OFFLINE := 1

##@ Use

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z][a-z-]*:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

.PHONY: demo
demo: $(STAMPS)/wheel ## Run the demo: one batch, four behaviours, a fourth adapter swapped in while it runs
	@$(VENV)/bin/hotslot demo

.PHONY: serve
serve: $(STAMPS)/wheel $(STAMPS)/test ## Serve the demo's model with its adapters; http://127.0.0.1:8000 has a page
	@$(VENV)/bin/hotslot serve "$$($(PY) -c 'from hotslot import smollm; print(smollm.ensure())')" --served-model-name smollm2 \
		--adapter-root examples/adapters --lora upper=examples/adapters/upper

.PHONY: build
build: $(STAMPS)/wheel ## Build the package in release mode and install it into .venv

##@ Check

.PHONY: test
test: test-rust test-python ## Run all tests: Rust, doc tests, loom, pytest

.PHONY: test-rust
test-rust: $(STAMPS)/tools ## Run the Rust tests, the doc tests and the loom models
	@echo "== rust: tests and doc tests"
	@if cargo nextest --version >/dev/null 2>&1; then cargo nextest run --workspace --all-features; else cargo test --workspace --all-features --lib --bins --tests; fi
	@cargo test -p hotslot-core -p hotslot-peer --all-features --doc
	@echo "== rust: examples"
	@for example in rust/core/examples/*.rs; do cargo run --quiet -p hotslot-core --example "$$(basename "$$example" .rs)" >/dev/null; done
	@echo "== rust: loom explores the thread interleavings of the slot word and the directory"
	@RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p hotslot-core --release --test 'loom*'

.PHONY: test-python
test-python: $(STAMPS)/wheel $(STAMPS)/test ## Run pytest; ARGS='-k route' passes arguments on
	@echo "== python: tests"
	@$(PY) -m pytest $(ARGS)

.PHONY: lint
lint: $(STAMPS)/wheel $(STAMPS)/test ## Run rustfmt, clippy, rustdoc, ruff, mypy --strict and stubtest
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m mypy.stubtest hotslot._core --allowlist tests/stubtest_allowlist.txt

.PHONY: format
format: $(STAMPS)/test ## Format Rust and Python in place
	cargo fmt --all
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .

.PHONY: wheel
wheel: $(STAMPS)/tools ## Build the abi3 wheel into dist/ and check what is in it
	$(MATURIN) build --release --out dist
	$(PY) tests/wheel_contents.py dist

##@ Longer

.PHONY: gpu
gpu: $(STAMPS)/wheel $(STAMPS)/test ## Check and measure all that needs a GPU (eight minutes); without one, prepare it in dist/gpu
	$(PY) -m tests.gpu.prepare_gpu dist/gpu
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(PY) -m tests.gpu.run_gpu --prepared dist/gpu --out dist/gpu; \
	else echo "hotslot: no GPU here; dist/gpu is ready for a machine with one, see docs/gpu.md"; fi

.PHONY: bench
bench: $(STAMPS)/wheel $(STAMPS)/test $(STAMPS)/bench ## Measure: criterion benches of the core, then each benches/bench_*.py; tables, plots, targets
	cargo bench -p hotslot-core
	$(PY) benches/run.py

.PHONY: compatibility
compatibility: $(STAMPS)/wheel $(STAMPS)/test ## Run each feature on each family against PEFT and write docs/compatibility.md (two minutes)
	$(PY) tests/write_compatibility.py

.PHONY: tsan
tsan: $(STAMPS)/tools ## Run the threaded life-cycle tests under ThreadSanitizer (x86-64 Linux)
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" CARGO_TARGET_DIR=target/tsan \
		TSAN_OPTIONS="suppressions=$(CURDIR)/rust/core/tests/tsan.supp" \
		cargo test -p hotslot-core --target x86_64-unknown-linux-gnu --test replace --test life_cycle

.PHONY: soak
soak: $(STAMPS)/wheel $(STAMPS)/test ## Run the state machines, the storms and a loaded server for longer (most of an hour)
	PROPTEST_CASES=3000 cargo test -p hotslot-core --release --test state_machine
	HYPOTHESIS_PROFILE=soak $(PY) -m pytest tests/test_life_cycle_machine.py tests/test_life_cycle.py tests/test_prefetch.py -k "machine or storm or sequence"
	HOTSLOT_STORM_SECONDS=120 $(PY) -m pytest tests/test_server_life.py -k storm
	$(PY) benches/soak_server.py --minutes 30

.PHONY: fuzz
fuzz: $(STAMPS)/wheel $(STAMPS)/test ## Fuzz the reader of adapter files for FUZZ_SECONDS=60; what breaks it stays in tests/fuzz/corpus
	@if $(HAS_UV); then $(UV_PIP) --quiet 'atheris>=3,<4'; else $(PIP) --quiet 'atheris>=3,<4'; fi \
		|| echo "hotslot: atheris does not install for this Python; fuzzing without its coverage"
	cd tests && ../$(PY) -m fuzz.run --seconds $(FUZZ_SECONDS)

.PHONY: adapters
adapters: $(STAMPS)/wheel $(STAMPS)/test ## Train the demo's four adapters again (ten minutes)
	$(PY) examples/train_adapters.py

.PHONY: clean
clean: ## Remove build results and .venv (the model stays in the user's cache)
	rm -rf target dist $(VENV) python/hotslot/_core*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

# --- set-up, each step once -------------------------------------------------------------------------------------------------

# First line of each message: what is missing. Second: what to do.
define CHECK_TOOLS
fail() { printf '\nhotslot: %s\n         %s\n\n' "$$1" "$$2" >&2; exit 1; }; \
command -v $(PYTHON) >/dev/null || fail "no $(PYTHON) found; Python 3.10 or newer is needed" "install it, or name one: make PYTHON=/path/to/python3 ..."; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$$($(PYTHON) --version) found; Python 3.10 or newer is needed" "name a newer one: make PYTHON=/path/to/python3.12 ..."; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || fail "$(PYTHON) has no venv module" "on Debian and Ubuntu: apt-get install python3-venv"; \
command -v cargo >/dev/null && command -v rustc >/dev/null || fail "no cargo and rustc found; Rust 1.89 or newer is needed" "install it from https://rustup.rs, then open a new shell"; \
rustc --version | awk '{split($$2, v, "."); exit !(v[1] > 1 || v[2] >= 89)}' || fail "$$(rustc --version) found; Rust 1.89 or newer is needed" "rustup update stable"; \
command -v cc >/dev/null || fail "no C compiler (cc) found; Rust links with it" "on Debian and Ubuntu: apt-get install build-essential"
endef

$(STAMPS)/tools:
	@$(CHECK_TOOLS)
	@echo "== set-up 1/3: .venv with the build tools"
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@$(PIP) --quiet uv || echo "hotslot: uv could not be installed; pip will be used (slower)"
	@if $(HAS_UV); then $(UV_PIP) --quiet 'maturin>=1.9,<2'; else $(PIP) --quiet --upgrade 'pip>=25.1' 'maturin>=1.9,<2'; fi
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: pyproject.toml | $(STAMPS)/tools
	@echo "== set-up 2/3: torch and transformers (5.6 GB on disk; half a minute with uv, three minutes with pip)"
	@if $(HAS_UV); then $(UV_PIP) -r pyproject.toml --extra demo; else $(PIP) '.[demo]'; fi
	@touch $@

$(STAMPS)/test: pyproject.toml | $(STAMPS)/tools
	@echo "== set-up: what the tests and the linters need"
	@if $(HAS_UV); then $(UV_PIP) -r pyproject.toml --extra server --group test; else $(PIP) '.[server]' && $(PIP) --group test; fi
	@if $(HAS_UV); then $(UV_PIP) --group gpu-ci; else $(PIP) --group gpu-ci; fi \
		|| echo "hotslot: NVIDIA's compiler could not be installed; tests that need it are skipped"
	@if $(HAS_UV); then $(UV_PIP) -r pyproject.toml --extra ray; else $(PIP) '.[ray]'; fi \
		|| echo "hotslot: Ray could not be installed; tests that need it are skipped"
	@touch $@

$(STAMPS)/bench: pyproject.toml | $(STAMPS)/tools
	@echo "== set-up: what draws the benches' plots, and a peer"
	@if $(HAS_UV); then $(UV_PIP) -r pyproject.toml --extra bench; else $(PIP) '.[bench]'; fi \
		|| echo "hotslot: not all of the bench extra could be installed; its plots or peer rows are left out"
	@touch $@

$(STAMPS)/wheel: $(RUST_SOURCES) pyproject.toml | $(STAMPS)/tools $(STAMPS)/demo
	@echo "== set-up 3/3: the package, release build (half a minute when nothing is built yet)"
	@$(MATURIN) develop --release $$( $(HAS_UV) && echo --uv || true )
	@touch $@
