# Two commands do everything: `make lab` to learn, `make test` to check. `make help` lists the rest.

VENV ?= .venv
IN_VENV = "$(VENV)/bin/python"
OLDEST_JAX = 0.11.2
START = --Application.log_level=ERROR --LabApp.default_url=/lab/tree/workbook/00_start_here.ipynb
# Jupyter refuses to run as root unless told so; it listens on this machine only, behind its token.
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)
# One worker a core: threads of their own would only get in each other's way.
ON_CPU = JAX_PLATFORMS=cpu OPENBLAS_NUM_THREADS=1
# Without its docstrings Jupyter's server does not start, and without assertions tests find little.
unexport PYTHONOPTIMIZE
ARGS ?=
NOTEBOOK ?=
# The public address of the repository, for example https://github.com/owner/name, and what the buttons of the site
# show of it. Where no address is given, the site has none of these buttons.
REPOSITORY ?=
REVISION ?= main

.PHONY: help setup lab fresh lesson test test-all test-oldest mutation notebooks figures lint site site-setup site-test colab gpu gpu-test gpu-fuzz gpu-bench gpu-compile tpu-compile cuda triton

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup:
	@sh helpers/setup_environment.sh "$(VENV)"

lab: setup ## open the series in JupyterLab, in your own copy of the notebooks
	@$(IN_VENV) -P helpers/workbook.py
	@echo "Starting JupyterLab, which takes some seconds."
	@$(IN_VENV) -P helpers/lab.py --ip=localhost $(AS_ROOT) $(START) $(ARGS)

fresh: setup ## put a fresh copy of a notebook beside yours: make fresh NOTEBOOK=05
	@$(IN_VENV) -P helpers/workbook.py fresh "$(NOTEBOOK)"

test: setup ## run the quick tier of the tests, the first notebooks included
	@$(ON_CPU) $(IN_VENV) -m pytest -n auto -m "not full" $(ARGS)

test-all: setup ## run all tests
	@$(ON_CPU) $(IN_VENV) -m pytest -n auto $(ARGS)

# Tests that ask little of JAX or nothing, and find the same on any.
ANY_JAX = answers colab files mutation numbers setup workbook
test-oldest: ## run the quick tests of helpers on the oldest JAX that is supported, each in one case
	@sh helpers/setup_environment.sh .venv-oldest $(OLDEST_JAX)
	@$(ON_CPU) .venv-oldest/bin/python -m pytest -n auto -m "not full" --one-case tests $(ANY_JAX:%=--ignore=tests/test_%.py) $(ARGS)

mutation: setup ## put faults into the code, one at a time, and see which tests notice
	@$(ON_CPU) $(IN_VENV) -m tests.mutation $(ARGS)

notebooks: setup ## execute all notebooks, or some, and write them back: make notebooks NOTEBOOK="03 05"
	@$(IN_VENV) -m helpers.dev.notebooks $(NOTEBOOK) $(ARGS)

lesson: setup ## lay out a new lesson with one exercise: make lesson NAME=linear_attention
	@$(IN_VENV) -m helpers.dev.lesson "$(NAME)"

figures: setup ## draw every picture that the Markdown cells show
	@$(IN_VENV) -m helpers.plots.collect

lint: setup ## check the style of code and notebooks
	@$(IN_VENV) -m ruff check
	@$(IN_VENV) -m ruff format --check

# Beside what everybody needs, 150 megabytes to make pages with: an environment of its own keeps them apart.
site-setup:
	@sh helpers/setup_environment.sh .venv-site
	@[ .venv-site/with-site -nt .venv-site/complete ] || { .venv-site/bin/python -m pip install --quiet \
		--disable-pip-version-check --constraint .venv-site/constraints.txt --editable '.[site]' && touch .venv-site/with-site; }

site: site-setup ## build the series as pages to read, in site/
	@.venv-site/bin/python -m helpers.site.build --repository "$(REPOSITORY)" --revision "$(REVISION)"

site-test: site-setup ## build the site and look at every page of it, in a browser where there is one
	@$(ON_CPU) .venv-site/bin/python -m pytest tests/test_site.py -rs $(ARGS)

colab: setup ## write copies of the notebooks for Colab to colab/, which install REPOSITORY at REVISION
	@$(IN_VENV) -m helpers.site.colab --repository "$(REPOSITORY)" --revision "$(REVISION)"

gpu: setup ## add CUDA to the environment, on a machine with an NVIDIA GPU
	@$(IN_VENV) -m pip install --disable-pip-version-check --constraint "$(VENV)/constraints.txt" --editable '.[test,gpu]'

# Processes beside each other compile on all cores, and share the memory of the GPU.
GPU_TESTS = tests/test_on_gpu.py tests/test_portable.py \
	tests/test_reference.py tests/test_api.py tests/test_in_use.py tests/test_decode.py tests/test_ring.py
gpu-test: setup ## run the kernels' tests on the GPU of this machine
	@XLA_PYTHON_CLIENT_PREALLOCATE=false $(IN_VENV) -m pytest -n 8 --dist worksteal $(GPU_TESTS) -rs $(ARGS)

gpu-fuzz: setup ## compare random calls on the GPU of this machine with float64 arithmetic
	@$(IN_VENV) -m helpers.dev.fuzz $(ARGS)

gpu-bench: setup ## measure the kernels on the GPU of this machine, next to cuDNN and installed peers
	@$(IN_VENV) -m helpers.dev.benchmark $(ARGS)

gpu-compile: ## compile the kernels for GPUs from Ampere to Blackwell, without one, and see what they spill
	@sh helpers/setup_environment.sh .venv-ptxas
	@.venv-ptxas/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-ptxas/constraints.txt --editable '.[ptxas]'
	@JAX_PLATFORMS=cpu .venv-ptxas/bin/python -m helpers.dev.ptxas $(ARGS)

tpu-compile: ## compile the kernels for TPUs with Google's compiler, without one, and see what they take
	@sh helpers/setup_environment.sh .venv-tpu
	@.venv-tpu/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-tpu/constraints.txt --editable '.[tpu]'
	@JAX_PLATFORMS=cpu .venv-tpu/bin/python -m helpers.dev.tpu_compile

triton: ## install Triton for notebook 16, run its kernels in its interpreter and compile them for a GPU
	@case "$$(uname -sm)" in "Linux x86_64" | "Linux aarch64") ;; \
		*) echo "There is no Triton for this machine: it is made for Linux. Notebook 16 shows what it printed elsewhere."; exit 1 ;; esac
	@sh helpers/setup_environment.sh .venv-triton
	@.venv-triton/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-triton/constraints.txt --editable '.[triton]'
	@$(ON_CPU) .venv-triton/bin/python -m pytest -n auto tests/test_triton.py $(ARGS)
	@JAX_PLATFORMS=cpu .venv-triton/bin/python -m helpers.dialects.triton_shown

cuda: ## compile the CUDA kernels of notebook 17 with NVIDIA's compiler, without a GPU, and run them on the CPU
	@case "$$(uname -sm)" in "Linux x86_64" | "Linux aarch64") ;; \
		*) echo "NVIDIA's compiler is made for Linux. Notebook 17 runs its kernels here by your C++ compiler alone."; exit 1 ;; esac
	@sh helpers/setup_environment.sh .venv-cuda
	@.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-cuda/constraints.txt --editable '.[cuda]'
	@.venv-cuda/bin/python -m helpers.dialects.cuda_compile
	@$(ON_CPU) .venv-cuda/bin/python -m pytest -n auto tests/test_cuda.py -rs $(ARGS)
	@$(ON_CPU) .venv-cuda/bin/python -m helpers.dialects.cuda_shown
