# make demo    install what is needed and run the quickstart on this machine; ENGINE=vllm: with vLLM instead of the embedded engine
# make test    install what is needed (with Slurm, where this is root on Debian or Ubuntu) and run all tests
# make learn   each family of algorithms learns the quickstart's task, and other whole training runs, minutes each; reports in a browser
# make trackers  install the packages of trackers and send a run to each
# make agents  install packages of environments and agents that ask an endpoint and train with each; NEMO_PYTHON=python3.13: NeMo-Gym with
#              another Python than python3.12
# make vision  install torchvision, and test vLLM with images
# make lerobot install lerobot and compare PI0.5 with its own; LEROBOT_PYTHON=python3.13: with another Python than python3.12
# make released  install a released model and released tokenizers from packages, and test what becomes of conversations with each
# make kernels install torchao and Liger's kernels, and test FP8, moments of 8 bits and what is replaced
# make faults  all failure scenarios on a real Slurm, and what `make test` leaves out: more than an hour
# make soak    a thousand processes of three runs killed, one after the other: hours; HPCRL_SOAK=300: so many; 10,000 steps of one run, and
#              10,000 episodes in sandboxes (HPCRL_EPISODES)
# make fuzz    a million messages to the controller and a million configurations, half an hour; HPCRL_FUZZ=1000: as many of each; 10,000 requests to vLLM
# make check   lint, format and types
#
# PYTHON=python3.12 make demo    with another Python than python3; where .venv is there already, remove it first

PYTHON    ?= python3
VENV      ?= .venv
BIN       := $(VENV)/bin
ENGINE    ?= transformers
LEROBOT_PYTHON ?= python3.12
NEMO_PYTHON ?= python3.12
TORCH     := $(shell grep '^torch==' requirements.lock)
TORCH_CPU ?= https://download.pytorch.org/whl/cpu
FAULTS    := $(shell grep -rl 'mark\.faults_slow' tests --include='test_*.py' | grep -v '^tests/faults/')
PIP       := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test learn trackers agents lerobot kernels vision released faults soak fuzz check format slurm egl fuse chromium npm
demo: $(VENV)/$(if $(filter vllm,$(ENGINE)),installed,embedded)
	$(BIN)/hpcrl submit configs/quickstart.toml generator.inference_engine.backend=$(ENGINE) --local --follow

# Three at a time: the tests of Slurm mostly wait. tests/conftest.py says which share a process. They read what another has compiled.
# Directories of tests are in memory, where that can be: they commit much, and a disk takes its time.
test: $(VENV)/installed slurm egl fuse
	PYTHONDONTWRITEBYTECODE= tests/in_memory $(BIN)/pytest -n 3 --no-loadscope-reorder

learn: $(VENV)/installed slurm chromium
	$(BIN)/pytest -m slow -s tests/jobs tests/slurm tests/observe tests/upload tests/sandboxes

# In an environment of their own: some want other versions than the lock has.
trackers:
	$(PYTHON) -m venv $(VENV)-trackers
	$(VENV)-trackers/bin/pip install --quiet -e '.[wandb,mlflow,swanlab,trackio]' pytest
	$(VENV)-trackers/bin/python -m pytest -m trackers --confcutdir tests/observe tests/observe/test_tracker_packages.py

# In environments of their own, which only the programs that are started use: each wants other versions than the other, and the lock.
agents: $(VENV)/installed
	$(PYTHON) -m venv $(VENV)-agents/verifiers
	$(VENV)-agents/verifiers/bin/pip install --quiet verifiers==0.4.0 uv
	$(PYTHON) -m venv $(VENV)-agents/openenv
	$(VENV)-agents/openenv/bin/pip install --quiet openenv==0.10.0
	$(PYTHON) -m venv $(VENV)-agents/mini
	$(VENV)-agents/mini/bin/pip install --quiet mini-swe-agent==2.4.6 litellm==1.110.2
	$(NEMO_PYTHON) -m venv $(VENV)-agents/nemo_gym
	$(VENV)-agents/nemo_gym/bin/pip install --quiet nemo-gym==0.4.0
	$(BIN)/pip install --quiet --target $(VENV)-agents/reasoning_gym --upgrade reasoning-gym==0.1.25
	HPCRL_AGENTS=$(abspath $(VENV)-agents) $(BIN)/pytest -m agents tests/jobs/agents tests/sandboxes

# In an environment of its own: it wants Python 3.12 or later, and older versions of torch and transformers than the lock has.
lerobot: $(VENV)/installed
	$(LEROBOT_PYTHON) -m venv $(VENV)-lerobot
	$(VENV)-lerobot/bin/pip install --quiet --no-cache-dir 'lerobot[pi]==0.6.1'
	HPCRL_LEROBOT=$(abspath $(VENV)-lerobot) $(BIN)/pytest -m lerobot -s tests/data/pi05

# Beside the environment, as its operators are compiled for CUDA: only the servers that tests start find it, and tests/vision/operators.
vision: $(VENV)/installed
	$(PIP) --no-deps --target $(VENV)-vision torchvision==0.28.0
	HPCRL_TORCHVISION=$(abspath $(VENV)-vision) $(BIN)/pytest -m vision tests/vision

# Other people's files: the model lies with its recipe, the tokenizers in .released, and git knows neither.
released: $(VENV)/installed npm
	test -d configs/recipes/smollm2/model || $(BIN)/python configs/recipes/smollm2/model.py
	$(BIN)/python tests/released/install.py .released
	$(PIP) --no-deps --upgrade --target $(VENV)-datasets datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1 xxhash==4.1.0
	$(PIP) --no-deps --upgrade --target $(VENV)-transformers4 transformers==4.57.6 huggingface-hub==0.36.2 tokenizers==0.22.2
	PYTHONPATH=$(VENV)-datasets HPCRL_TRANSFORMERS_4=$(abspath $(VENV)-transformers4) \
	  $(BIN)/pytest -n 2 -m released tests/released tests/data/hub tests/cli/test_own_reward.py tests/sandboxes/test_learning.py

# Beside the environment: where transformers finds torchao, each process imports it, for a second. Triton's interpreter stands for a GPU.
kernels: $(VENV)/installed
	$(PIP) --no-deps --target $(VENV)-kernels torchao==0.18.0 liger-kernel==0.8.5 triton==3.9.0
	PYTHONPATH=$(VENV)-kernels $(BIN)/pytest -m kernels tests/trainer/kernels

# Scenarios run several at a time in one process, and the others beside each other as those of `make test`.
faults: $(VENV)/installed slurm fuse
	$(BIN)/pytest -m "not soak and not slow" tests/faults
	$(BIN)/pytest -m "faults_slow and not slow" -n 2 --no-loadscope-reorder $(FAULTS)

soak: $(VENV)/installed slurm
	HPCRL_SOAK=$${HPCRL_SOAK:-1000} HPCRL_EPISODES=$${HPCRL_EPISODES:-10000} $(BIN)/pytest -m "not slow" -s tests/faults/test_soak.py tests/faults/test_goodput.py tests/jobs/test_growth.py tests/sandboxes/test_kills.py

fuzz: $(VENV)/installed
	$(BIN)/pytest -m fuzz -s tests/fuzz tests/rollout/endpoint

check: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(VENV)/embedded: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v < (3, 15) else \
	  "hpcrl needs Python 3.10 to 3.14, and $(PYTHON) is %d.%d; set PYTHON to another: PYTHON=python3.12 make demo" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@$(PIP) --no-deps $(TORCH)+cpu 2> /dev/null || \
	  $(PIP) --no-deps $(TORCH)+cpu --index-url $(TORCH_CPU) --timeout 10 --retries 1 2> /dev/null || { \
	  echo "no CPU build of $(TORCH) on this machine's package indexes or $(TORCH_CPU):"; \
	  echo "taking the CUDA build, which works on CPUs too; 4.7 GB with what it needs"; \
	  $(PIP) $(TORCH) -c requirements.lock -c requirements-cpu.lock; }
	$(PIP) --no-deps -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__)'
	touch $@

$(VENV)/installed: $(VENV)/embedded requirements-cpu.lock
	$(PIP) --no-deps -r requirements-cpu.lock
	touch $@

slurm:
	@{ command -v slurmctld && command -v slurmdbd && command -v mariadbd; } > /dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge iproute2 slurmdbd mariadb-server > /dev/null; \
	else echo "no Slurm here and no way to install it: the tests that need it will be skipped"; fi

egl:
	@ldconfig -p | grep -q libEGL.so.1 || if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libegl1 libgl1-mesa-dri > /dev/null; \
	else echo "no libEGL here and no way to install it: the tests of what simulators render will be skipped"; fi

fuse:
	@command -v fuse-overlayfs > /dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq fuse-overlayfs > /dev/null; \
	else echo "no fuse-overlayfs here and no way to install it: the tests of sandboxes on older kernels will be skipped"; fi

chromium:
	@command -v chromedriver > /dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver > /dev/null; \
	else echo "no Chromium here and no way to install it: the tests of reports in a browser will fail"; fi

npm:
	@command -v npm > /dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends npm > /dev/null; \
	else echo "no npm here and no way to install it: the tests of released tokenizers will be skipped"; fi
