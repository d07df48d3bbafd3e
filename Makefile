# make webshop    set up .venv and run the WebShop recipe
# make test       set up .venv and run the tests
# make test-gpu   the tests that need a CUDA GPU
# make test-recipes  a step of every recipe on the embedded model, about 15 minutes
# make lint       style checks
# ARGS="..." is passed on: make webshop ARGS="trainer.total_epochs=2"
PYTHON3 ?= $(shell command -v python3 || command -v python)
VENV_PYTHON := .venv/bin/python
QUIET := OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 TOKENIZERS_PARALLELISM=false

.PHONY: setup webshop test test-gpu test-recipes lint

setup:
	@$(PYTHON3) scripts/setup_env.py

webshop: setup
	@bash examples/gigpo_trainer/run_webshop.sh $(ARGS)

test: setup
	$(QUIET) $(VENV_PYTHON) -m pytest -m "not gpu and not recipes" $(ARGS)

test-gpu: setup
	$(VENV_PYTHON) -m pytest -m gpu $(ARGS)

test-recipes: setup
	$(QUIET) $(VENV_PYTHON) -m pytest -m recipes $(ARGS)

lint: setup
	$(VENV_PYTHON) -m ruff check .
