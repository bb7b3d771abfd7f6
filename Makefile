# make demo    install what is needed and run the quickstart on this machine
# make test    install what is needed (with Slurm, where this is root on Debian or Ubuntu) and run all tests
# make learn   each family of algorithms learns the quickstart's task: whole training runs, minutes each
# make faults  all failure scenarios on a real Slurm, also those that `make test` leaves out: an hour
# make soak    one run, preempted or killed thirty times
# make check   lint, format and types

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LOCK   := requirements-cpu.lock
ALONE  := tests/faults tests/jobs tests/slurm

.PHONY: demo test learn faults soak check format slurm
demo: $(VENV)/installed
	$(BIN)/hpcrl submit configs/quickstart.toml --local --follow

# Two at a time what needs no cluster and times no whole run; make goes on to the rest where that fails.
test: $(VENV)/installed slurm
	@failed=0; \
	$(BIN)/pytest -n 2 --dist loadfile $(foreach place,$(ALONE),--ignore $(place)) || failed=1; \
	$(BIN)/pytest $(ALONE) || failed=1; \
	exit $$failed

learn: $(VENV)/installed slurm
	$(BIN)/pytest -m slow -s tests/jobs/test_learning.py tests/slurm/test_megatron.py

faults: $(VENV)/installed slurm
	$(BIN)/pytest -m "not soak and not slow" tests/faults tests/slurm/test_runs.py tests/slurm/test_pool.py tests/slurm/test_megatron.py tests/jobs/test_local_run.py

soak: $(VENV)/installed slurm
	$(BIN)/pytest -m soak -s tests/faults/test_soak.py

check: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(VENV)/installed: $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r $(LOCK) || { echo; \
	  echo "Is torch's CPU build what is missing? Set PIP_EXTRA_INDEX_URL to the CPU wheel index that pytorch.org names under Get Started."; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

slurm:
	@{ command -v slurmctld && command -v slurmdbd && command -v mariadbd; } > /dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge iproute2 slurmdbd mariadb-server > /dev/null; \
	else echo "no Slurm here and no way to install it: the tests that need it will be skipped"; fi
