# make demo / make test set everything up in .venv and build/ and run; nothing else on
# the system is touched. The second time they start at once.
# CMAKE_ARGS reaches llama.cpp:  make demo CMAKE_ARGS=-DGGML_CUDA=ON

PYTHON ?= python3
# A cache of our own: the bindings-only wheel of llama-cpp-python made below must not be
# what another project's `pip install llama-cpp-python` finds in the user's cache.
export PIP_CACHE_DIR := $(CURDIR)/build/pip-cache
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv
BIN := $(VENV)/bin
STEP := $(BIN)/python native/build/step.py
LOGS := build/logs

# What the installed package is made from, and with which flags. Kept as a file so that a
# deleted source or a changed flag also counts as a change.
SOURCES := $(sort $(shell find flashmoe_gguf native patches -type f \
	! -path '*/__pycache__/*' ! -path 'native/tests/*' ! -name '*.md')) pyproject.toml models.toml
INPUTS := $(SOURCES) CMAKE_ARGS=$(CMAKE_ARGS) CC=$(CC) CXX=$(CXX) \
	CFLAGS=$(CFLAGS) CXXFLAGS=$(CXXFLAGS) LDFLAGS=$(LDFLAGS)

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz soak hybrid lint install clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: install ## build, make the embedded model, chat with it on half of its experts
	$(BIN)/flashmoe demo

test: lint ## build, check and run all tests
	$(BIN)/pytest

fuzz: install ## 100,000 damaged model files through all that reads them
	cd tests && ../$(BIN)/python -m fuzz.run

soak: install ## an hour of eight clients against a server: make soak MODEL=model.gguf
	$(BIN)/python -m flashmoe_gguf.server.soak $(MODEL) --seconds 3600

hybrid: install ## llama.cpp with a device that needs no GPU, and the tests of layers on a device
	@CMAKE_ARGS="$(CMAKE_ARGS) -DGGML_RPC=ON" $(STEP) "libraries with the RPC backend" \
		$(LOGS)/hybrid.log $(BIN)/pip install -v --no-deps --upgrade \
		--target build/hybrid/site -C build-dir='build/hybrid/{wheel_tag}' .
	PYTHONPATH=build/hybrid/site $(BIN)/pytest tests/test_hybrid.py

lint: install ## format, lint and type checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(VENV)/installed ## build the package and install it into .venv

clean: ## remove .venv and build
	rm -rf $(VENV) build

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than 3.10: make PYTHON=python3.12"; exit 1; }
	@echo "== virtual environment $(VENV)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "venv failed; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@touch $@

# llama.cpp itself is built by our package, so the bindings need none of their own.
$(VENV)/bindings: native/pin.txt $(VENV)/created
	@CMAKE_ARGS=-DLLAMA_BUILD=OFF $(STEP) "llama-cpp-python, bindings only" $(LOGS)/bindings.log \
		$(BIN)/pip install -v --no-deps --no-binary llama-cpp-python -r native/pin.txt
	@touch $@

$(VENV)/installed: $(VENV)/bindings build/inputs.txt $(SOURCES)
	@$(STEP) "flashmoe-gguf: build and install" $(LOGS)/install.log \
		$(BIN)/pip install -v '.[demo,test]'
	@touch $@

build/inputs.txt: FORCE
	@mkdir -p build
	@printf '%s\n' '$(subst ','\'',$(INPUTS))' > $@.new
	@if [ "$$(cat $@ 2>/dev/null)" = "$$(cat $@.new)" ]; then rm $@.new; else mv $@.new $@; fi
