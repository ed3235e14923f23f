# For GNU make 3.81 (the one macOS has) and later. Needs Python 3.10 to 3.14.
# To change a setting: make demo RANKS=4, make setup PYTHON=python3.12, and so on.

VENV ?= .venv
# The first of these that is a Python we can use; or name yours.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python3.14; \
	do if $$p -c $(CAN_USE) 2>/dev/null; then echo $$p; break; fi; done)
# Where packages come from: another index, an index for torch alone, a folder of wheels.
INDEX ?=
TORCH_INDEX ?=
WHEELS ?=
# How many ranks (default 2; lesson 05 has 8), and flags for the lesson or for pytest.
RANKS ?=
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLING := $(VENV)/.installing
CAN_USE := 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))'
PIP := $(BIN)/python -m pip --disable-pip-version-check
FROM := $(if $(WHEELS),--no-index --find-links "$(WHEELS)",$(if $(INDEX),--index-url "$(INDEX)"))
TORCH_FROM := $(if $(WHEELS),$(FROM),$(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)",$(FROM)))

# One thread a rank: ranks share the cores. It also silences torchrun's starred banner.
export OMP_NUM_THREADS ?= 1
# All ranks are on this machine, so its own name need not resolve (on many a laptop it
# does not, and torchrun then hangs): PET_LOCAL_ADDR is torchrun's --local-addr.
# `make check` does without, to see what you will see when you call torchrun yourself.
LOOPBACK := $(if $(filter Darwin,$(shell uname -s)),lo0,lo)
ONE_MACHINE := PET_LOCAL_ADDR=$${PET_LOCAL_ADDR:-127.0.0.1} \
	GLOO_SOCKET_IFNAME=$${GLOO_SOCKET_IFNAME:-$(LOOPBACK)}

.PHONY: help demo setup check lessons notebooks notebooks-run assets test lint wheels clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s%s\n", $$1, $$2 }' Makefile

demo: $(INSTALLED) ## one MLP on two ranks: set up if need be, run lesson 01, see PASS
	@echo "torchrun --standalone --nproc_per_node=$(or $(RANKS),2) 01_naive_mlp_tp.py $(ARGS)"
	@$(ONE_MACHINE) $(BIN)/torchrun --standalone --nproc_per_node=$(or $(RANKS),2) \
		01_naive_mlp_tp.py $(ARGS)

setup: $(INSTALLED) ## make the environment .venv and install requirements.txt into it
	@echo "ready; to use it in this shell: . $(BIN)/activate"

check: $(INSTALLED) ## can this machine run the course? in seconds, and what to do if not
	@$(BIN)/python tests/preflight.py

lessons: $(INSTALLED) ## run all lessons on two ranks (RANKS=4: on four), one summary table
	@$(ONE_MACHINE) $(BIN)/python tests/all_lessons.py $(if $(RANKS),--ranks $(RANKS))

notebooks: $(INSTALLED) ## open the notebooks in the browser
	@$(BIN)/python -m jupyter lab notebooks

notebooks-run: $(INSTALLED) ## execute all notebooks and save them (ARGS=00_collectives: one)
	@$(BIN)/python notebooks/run.py $(ARGS)

assets: $(INSTALLED) ## write the pictures of the notebooks' tagged cells into assets/
	@$(BIN)/python notebooks/run.py --assets $(ARGS)

test: lint ## run all the tests (ARGS="-k setup": some), after lint
	@$(ONE_MACHINE) $(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED) ## check style and format with ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

wheels: $(INSTALLED) ## fill the folder wheels/, to install from where the wifi is bad
	$(PIP) wheel --wheel-dir wheels $(TORCH_FROM) "$$(grep '^torch==' requirements.txt)"
	$(PIP) wheel --wheel-dir wheels --find-links wheels $(FROM) -r requirements.txt

clean: ## remove the environment and all caches
	@if [ -f $(INSTALLED) ] || [ -f $(INSTALLING) ]; then rm -rf $(VENV); fi
	@rm -rf .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# .installing stands from the first step to the last: an environment that has it was
# interrupted, and is made anew. Any other folder with something in it is not ours.
$(INSTALLED): requirements.txt
	@"$(PYTHON)" -c $(CAN_USE) 2>/dev/null || { \
		echo "error: found no Python 3.10 to 3.14 as '$(PYTHON)': install one, or name" \
			"it: make setup PYTHON=/path/to/python3.12"; exit 2; }
	@if [ -f $(INSTALLING) ]; then rm -rf $(VENV); fi
	@if [ ! -f $@ ] && [ -n "$$(ls -A $(VENV) 2>/dev/null)" ]; then \
		echo "error: the folder $(VENV) is there already, and not made by this Makefile:" \
			"move it away, or choose another: make setup VENV=.venv-tp"; exit 2; fi
	@mkdir -p $(VENV) && touch $(INSTALLING) && rm -f $@
	@"$(PYTHON)" -m venv $(VENV) || { \
		echo "error: $(PYTHON) cannot make an environment; on Debian and Ubuntu:" \
			"sudo apt install python3-venv"; exit 2; }
	$(PIP) install $(TORCH_FROM) "$$(grep '^torch==' requirements.txt)"
	@echo "Installing the other packages (a minute or two)"
	@$(PIP) install --quiet $(FROM) -r requirements.txt
	@mv $(INSTALLING) $@ && touch $@
