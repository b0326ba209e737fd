# Two commands do everything on a machine with Python >= 3.11 and make: `make quickstart` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
# The torch the suite was last run with. TORCH=torch takes the newest one instead.
TORCH  ?= torch==2.13.0
# pytest processes, one thread each; WORKERS=0 runs all tests in one.
WORKERS ?= 2
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# A worker takes whole files, in the order of tests/conftest.py: the longest first, so that both end together.
SUITE  := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# A part of the suite, e.g. make test-lowest TESTS="tests/models/test_models.py tests/models/test_lora.py"; empty: all of it.
TESTS ?=
PIP    := -m pip install -q --disable-pip-version-check

.PHONY: install quickstart test test-lowest test-newest fuzz faults mutants full-size check results licences docs clean help

help:
	@echo "make quickstart   install into $(VENV), erase a concept from the bundled model, measure, report"
	@echo "make test         install into $(VENV) and run the test suite"
	@echo "make install      install into $(VENV), and nothing else"
	@echo "make test-lowest  the suite with the lower bound of every library, in .venv-lowest; torch stays $(TORCH)"
	@echo "make test-newest  the suite with the newest of every library, in .venv-newest; torch stays $(TORCH),"
	@echo "                  TORCH=torch takes the newest, which may bring gigabytes of CUDA"
	@echo "make fuzz         100,000 damaged inputs and 1,000 random command lines; counts in tests/campaigns/results"
	@echo "make faults       kills, full disks and the like, on real processes; a table in tests/campaigns/results"
	@echo "make mutants      mutation testing of methods, vectors, statistics and storage"
	@echo "make full-size    the commands on Stable Diffusion 1.4's architecture, random weights; 40 GB of disk, some hours on one thread"
	@echo "make check        ruff and mypy"
	@echo "make results      render the pages of eval/results from the tables of the studies"
	@echo "make licences     render docs/licences.md from what is installed"
	@echo "make docs         build the documentation site into docs/_build/html"
	@echo "make clean        remove what can be built again: the site, dist and caches; runs stays"

# torch first and then held, so that a CPU build which is at hand is not replaced by one with gigabytes of CUDA.
$(STAMP): pyproject.toml tools/mend_torchvision.py
	@echo "installing into $(VENV): torch first, then the rest; this takes a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@date +%s > $(VENV)/.began
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > $(VENV)/torch.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/torch.txt -e ".[dev]"
	$(BIN)/python tools/mend_torchvision.py
	@echo $$(( $$(date +%s) - $$(cat $(VENV)/.began) )) > $(STAMP)

install: $(STAMP)
	@echo "installed; next: source $(BIN)/activate"

quickstart: $(STAMP)
	@INSTALL_SECONDS=$$(cat $(STAMP)) $(BIN)/concept-eraser quickstart

test: $(STAMP)
	$(BIN)/python -m pytest $(SUITE)

# Before a release, not in CI. Both hold torch at TORCH: the other builds are not at hand everywhere, and large.
test-lowest: .venv-lowest/.installed
	@echo "lowest libraries, with $$(cat .venv-lowest/torch.txt); the bound of torch itself is not tested here"
	.venv-lowest/bin/python -m pytest $(SUITE) $(TESTS)

.venv-lowest/.installed: pyproject.toml tools/lowest.py tools/mend_torchvision.py
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/python $(PIP) "$(TORCH)"
	.venv-lowest/bin/python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > .venv-lowest/torch.txt
	$(PYTHON) -m tools.lowest > .venv-lowest/lowest.txt
	.venv-lowest/bin/python $(PIP) -c .venv-lowest/torch.txt -c .venv-lowest/lowest.txt -e ".[dev]"
	.venv-lowest/bin/python tools/mend_torchvision.py
	touch $@

test-newest: .venv-newest/.installed
	@echo "newest libraries, with $$(cat .venv-newest/torch.txt)"
	.venv-newest/bin/python -m pytest $(SUITE) $(TESTS)

.venv-newest/.installed: pyproject.toml tools/mend_torchvision.py
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python $(PIP) --upgrade "$(TORCH)"
	.venv-newest/bin/python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > .venv-newest/torch.txt
	.venv-newest/bin/python $(PIP) --upgrade --upgrade-strategy eager -c .venv-newest/torch.txt -e ".[dev]"
	.venv-newest/bin/python tools/mend_torchvision.py
	touch $@

# Before a release, not in CI: each takes up to hours, and writes its counts to tests/campaigns/results.
fuzz: $(STAMP)
	$(BIN)/python -m tests.campaigns.fuzz --n 100000
	$(BIN)/python -m tests.campaigns.commands --n 1000 --seed 0

faults: $(STAMP)
	$(BIN)/python -m tests.campaigns.faults --kills 50

mutants: $(STAMP)
	$(BIN)/python -m tests.campaigns.mutants

full-size: $(STAMP)
	$(BIN)/python -m benchmarks.full_size

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

results: $(STAMP)
	$(BIN)/python -m studies.render_results

licences: $(STAMP)
	$(BIN)/python -m tools.licences

# -W: a warning is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "the documentation is in docs/_build/html/index.html"

# runs/ has trained models, and results of studies that are not in a table yet.
clean:
	rm -rf docs/_build docs/reference/generated .pytest_cache .mypy_cache .ruff_cache dist
