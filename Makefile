PYTHON ?= python3
PROMPT ?=
SEED ?=
PORT ?= 8188
VENV_PYTHON = .venv/bin/python
export TORCH TORCH_INDEX PROMPT SEED

.PHONY: help python host host-dev demo serve lint test clean

help:
	@echo "make demo   paint output/demo.png with the bundled tiny checkpoint (PROMPT=... SEED=... to choose)"
	@echo "make test   lint and run every test"
	@echo "make serve  leave the real ComfyUI running at http://127.0.0.1:$(PORT)"
	@echo "make host   only set up ComfyUI   (TORCH_INDEX=https://download.pytorch.org/whl/cpu: smaller torch)"
	@echo "make clean  remove the environment, the host and the caches"

python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "Set-up stopped: '$(PYTHON)' not found. Install Python 3.10 to 3.13 or name it: make host PYTHON=/path/to/python3"; exit 1; }

host: python
	@$(PYTHON) tools/host.py

host-dev: python
	@$(PYTHON) tools/host.py --dev

demo: host
	@$(VENV_PYTHON) tools/demo.py

serve: host
	@$(VENV_PYTHON) tools/demo.py --serve --port $(PORT)

lint: host-dev
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m pyright

test: lint
	@$(VENV_PYTHON) -m pytest

clean:
	rm -rf .venv .host .cache .pytest_cache .ruff_cache .hypothesis output
