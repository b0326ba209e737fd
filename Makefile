# Two commands do everything on a machine with Python >= 3.11 and make: `make quickstart` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
# The torch the suite was last run with. TORCH=torch takes the newest one instead.
TORCH  ?= torch==2.13.0
# pytest processes, one thread each; WORKERS=0 runs all tests in one.
WORKERS ?= 2
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: quickstart test lint types check results clean help

help:
	@echo "make quickstart   install into $(VENV), erase a concept from the bundled model, measure, report"
	@echo "make test         install into $(VENV) and run the test suite"
	@echo "make check        ruff and mypy"
	@echo "make results      render eval/results/*.md from their JSON"

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

quickstart: $(STAMP)
	@INSTALL_SECONDS=$$(cat $(STAMP)) $(BIN)/concept-eraser quickstart

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

results: $(STAMP)
	$(BIN)/python -m tools.render_results

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache dist
