# For GNU make 3.81 (macOS has it) and later. Settings: make demo RANKS=4 ARGS=--help, …
# INDEX, TORCH_INDEX (only for torch) and WHEELS say where packages come from.
VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python3.14; \
	do if $$p -c $(CAN_USE) 2>/dev/null; then echo $$p; break; fi; done)
CAN_USE := 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))'
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
FROM := $(if $(WHEELS),--no-index --find-links "$(WHEELS)",$(if $(INDEX),--index-url "$(INDEX)"))
TORCH_FROM := $(if $(WHEELS),$(FROM),$(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)",$(FROM)))
DEMO := --standalone --nproc_per_node=$(or $(RANKS),2) 01_naive_mlp_tp.py $(ARGS)
# One thread per rank: ranks share the cores. It also silences torchrun's starred banner.
export OMP_NUM_THREADS ?= 1
# torchrun asks for this machine's name, which on many a laptop does not resolve.
LOCAL := PET_LOCAL_ADDR=$${PET_LOCAL_ADDR:-127.0.0.1} \
	GLOO_SOCKET_IFNAME=$${GLOO_SOCKET_IFNAME:-$(if $(filter Darwin,$(shell uname)),lo0,lo)}
$(if $(word 2,$(VENV)),$(error VENV is to be one word, not: $(VENV)))
$(if $(RANKS),$(if $(shell echo "$(RANKS)" | grep -xE '[1-9][0-9]*'),,\
	$(error RANKS is to be a number from 1 on, not: $(RANKS))))
$(if $(wildcard requirements.txt),,$(error call make in the folder of the course))
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s%s\n", $$1, $$2 }' Makefile
demo: $(VENV)/.base ## one MLP on two ranks: set up if need be, run lesson 01, see PASS
	@echo "torchrun $(DEMO)"
	@$(LOCAL) $(RUN) -m torch.distributed.run $(DEMO)
setup: $(VENV)/$(if $(EXTRA),.extra,.base) ## make the environment (EXTRA=1: with what tests need)
	@echo "ready; to use it in this shell: . $(VENV)/bin/activate"
check: $(VENV)/.base ## can this machine run the course? in seconds, and what to do if not
	@$(RUN) tools/check.py $(ARGS)
lessons: $(VENV)/.base ## run all lessons on two ranks (RANKS=4: on four), one summary table
bench: $(VENV)/.base ## how long a step takes by hand and by DTensor, and how long a lesson
plan: $(VENV)/.base ## before you book GPUs: which dp, pp, tp (ARGS="--model gpt3 --gpus 1024")
submission: $(VENV)/.base ## check the exercises in notebooks/, write submission.json
lessons bench plan submission carry audit:
	@$(LOCAL) $(RUN) tools/$@.py $(ARGS)
gpu-report: $(VENV)/.base ## measure your 2 to 8 GPUs, in ten minutes (ARGS=--cpu: CPUs)
	@$(LOCAL) $(RUN) tools/gpu_report.py $(ARGS)
notebooks: $(VENV)/.base ## open the notebooks in the browser
	@$(RUN) -m jupyter lab notebooks
notebooks-run: $(VENV)/.base ## execute notebooks, write assets/ (ARGS=00_collectives: one)
	@$(RUN) notebooks/run.py $(ARGS)
test: lint ## run all the tests (ARGS="-k setup": some), after lint
	@$(LOCAL) $(RUN) -m pytest $(ARGS)
quick: $(VENV)/.extra ## the essential tests, in half a minute
	@$(LOCAL) $(RUN) -m pytest -m essential $(ARGS)
audit: $(VENV)/.base ## is your own parallel model right? (ARGS="my_model.py --ranks 2 4")
carry: $(VENV)/.base ## write the parts that lessons carry over from earlier ones
mutants: $(VENV)/.extra ## small wrong edits of the lessons: is each one caught?
	@$(LOCAL) $(RUN) tests/mutants.py $(ARGS)
lint: $(VENV)/.extra ## check style and format with ruff
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check .
site: $(VENV)/.extra ## build the site, its players and slides, into site/html
	@$(RUN) -m sphinx -q -W --keep-going -j 2 -d site/doctrees docs site/html
	@$(RUN) -m sphinx -q -W --keep-going -b revealjs -d site/doctrees-slides docs/slides site/html/slides
	@echo "built: site/html/index.html; to look at it: make site-serve"
site-serve: site ## show the site in the browser, at localhost (PORT=8000)
	@$(RUN) -m http.server --bind 127.0.0.1 --directory site/html $(or $(PORT),8000)
wheels: $(VENV)/.base ## fill the folder wheels/, to install from where the wifi is bad
	$(PIP) wheel -w wheels $(TORCH_FROM) "$$(grep '^torch==' requirements.txt)"
	$(PIP) wheel -w wheels -f wheels $(FROM) -r requirements.txt -r requirements-extra.txt
clean: ## remove the environment and all caches
	@rm -rf .pytest_cache .ruff_cache site docs/notebooks
	@case "$$(cat "$(VENV)/.base" 2>&1)" in "$(CURDIR)"|"interrupted $(CURDIR)") rm -rf $(VENV); esac
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(VENV)/.base names the folder that made it. What another folder made is never removed.
.PHONY: $(shell [ "$$(cat "$(VENV)/.base" 2>&1)" = "$(CURDIR)" ] || echo "$(VENV)/.base")
$(VENV)/.base: requirements.txt
	@"$(PYTHON)" -c $(CAN_USE) 2>/dev/null || { echo "error: found no Python 3.10 to 3.14 as" \
		"'$(PYTHON)': install one, or name it: make setup PYTHON=/path/to/python3.12"; exit 2; }
	@case "$$(cat $@ 2>/dev/null)" in "$(CURDIR)") ;; "interrupted $(CURDIR)") rm -rf $(VENV) ;; \
		*) [ -z "$$(ls -A $(VENV) 2>/dev/null)" ] || { echo "error: the folder $(VENV) was not" \
		"made by $(CURDIR): remove it yourself, or choose another: make setup VENV=.venv-tp"; \
		exit 2; } ;; esac
	@mkdir -p $(VENV) 2>/dev/null && [ -w $(VENV) ] || { echo "error: the folder $(VENV) cannot be" \
		"written here: choose another: make setup VENV=/other/place"; exit 2; }
	@echo "interrupted $(CURDIR)" > $@
	@"$(PYTHON)" -m venv $(VENV)
	$(PIP) install $(TORCH_FROM) "$$(grep '^torch==' requirements.txt)"
	$(PIP) install --quiet $(FROM) -r requirements.txt
	@echo "$(CURDIR)" > $@
$(VENV)/.extra: $(VENV)/.base requirements-extra.txt
	@$(PIP) install --quiet $(FROM) -r requirements.txt -r requirements-extra.txt
	@touch $@
