# Two commands do everything: `make lab` to learn, `make test` to check. `make help` lists the rest.

VENV ?= .venv
IN_VENV = $(VENV)/bin/python
OLDEST_JAX = 0.11.2
START = --LabApp.default_url=/lab/tree/workbook/00_start_here.ipynb
# Jupyter refuses to run as root unless told so; it listens on this machine only, behind its token.
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)
# One worker a core: threads of their own would only get in each other's way.
ON_CPU = JAX_PLATFORMS=cpu OPENBLAS_NUM_THREADS=1
ARGS ?=

.PHONY: help setup lab test test-oldest notebooks figures lint gpu gpu-test gpu-bench gpu-tune gpu-compile

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup:
	@sh helpers/setup_environment.sh "$(VENV)"

lab: setup ## open the series in JupyterLab, in your own copy of the notebooks
	@$(IN_VENV) -m helpers.notebooks workbook
	@$(IN_VENV) -m jupyter lab --ip=localhost $(AS_ROOT) $(START) $(ARGS)

test: setup ## run the whole test suite, notebooks included
	@$(ON_CPU) $(IN_VENV) -m pytest -n auto $(ARGS)

test-oldest: ## run the tests of helpers on the oldest JAX that is supported
	@sh helpers/setup_environment.sh .venv-oldest $(OLDEST_JAX)
	@$(ON_CPU) .venv-oldest/bin/python -m pytest -n auto tests --ignore=tests/test_browser.py $(ARGS)

notebooks: setup ## execute every notebook and write it back, normalised
	@$(IN_VENV) -m helpers.notebooks execute

figures: setup ## draw every picture that the Markdown cells show
	@$(IN_VENV) -m helpers.plots

lint: setup ## check the style of code and notebooks
	@$(IN_VENV) -m ruff check
	@$(IN_VENV) -m ruff format --check

gpu: setup ## add CUDA to the environment, on a machine with an NVIDIA GPU
	@$(IN_VENV) -m pip install --disable-pip-version-check --constraint $(VENV)/constraints.txt --editable '.[test,gpu]'

gpu-test: setup ## run the kernels' tests on the GPU of this machine
	@$(IN_VENV) -m pytest tests/test_portable_forward.py tests/test_portable_backward.py tests/test_footprint.py tests/test_on_gpu.py tests/test_reference.py tests/test_api.py -rs $(ARGS)

gpu-bench: setup ## measure the kernels on the GPU of this machine, next to cuDNN and installed peers
	@$(IN_VENV) -m helpers.measure.benchmark $(ARGS)

gpu-tune: setup ## find the fastest tiles of the kernels for this GPU and record them
	@$(IN_VENV) -m helpers.measure.tune $(ARGS)

gpu-compile: ## compile the Hopper kernels with ptxas, GPU or not, and see that they keep to their registers
	@sh helpers/setup_environment.sh .venv-ptxas
	@.venv-ptxas/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-ptxas/constraints.txt --editable '.[ptxas]'
	@JAX_PLATFORMS=cpu .venv-ptxas/bin/python -m helpers.measure.ptxas $(ARGS)
