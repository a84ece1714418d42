# make lab      JupyterLab on the first notebook          make lab ARGS="--port 9000"
# make test     every test, notebook and browser check    make test ARGS="-k router"
# make check    lint and formatting
# make gallery  run all notebooks and render them, pictures in gallery/, pages in gallery/html
# make oracle   rebuild the reference fixtures with torch and transformers; make oracle-compare only compares
# make clean    remove what the others made (the environments too)
#
# PYTHON names the interpreter that .venv is made from; ZIG=1 brings a C++ compiler as a Python package.

PYTHON ?= python3
WORKERS ?= 2
ZIG ?=
ARGS ?=
FAMILIES ?=

VENV := .venv
ORACLE := .venv-oracle
RUN := $(VENV)/bin/python
NOTEBOOK := notebooks/00_start_here.ipynb
MODEL := data/colibri-tiny

# A browser opens only where there is a screen; root needs to say that it means it.
SCREEN := $(or $(DISPLAY),$(WAYLAND_DISPLAY),$(filter Darwin,$(shell uname)))
JUPYTER := $(if $(SCREEN),,--no-browser) $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: lab test check gallery oracle oracle-compare clean preflight preflight-test

lab: preflight $(VENV)/lab.stamp
	@$(RUN) -m colibri_lab kernels build
	@$(RUN) -m colibri_lab run --model $(MODEL) --validate
	@$(RUN) -m jupyterlab $(JUPYTER) --LabApp.default_url=/lab/tree/$(NOTEBOOK) $(ARGS)

test: preflight-test $(VENV)/test.stamp
	@$(RUN) -m colibri_lab kernels build
	@$(RUN) -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

check: $(VENV)/test.stamp
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

gallery: preflight $(VENV)/test.stamp
	@$(RUN) -m colibri_lab kernels build
	@$(RUN) gallery/make_gallery.py $(ARGS)

oracle: $(ORACLE)/oracle.stamp
	@$(ORACLE)/bin/python tests/oracle/make_oracle.py tests/oracle $(FAMILIES)
	@$(ORACLE)/bin/python tests/oracle/make_oracle.py --tiny $(MODEL) tests/oracle/tiny

oracle-compare: $(ORACLE)/oracle.stamp
	@$(ORACLE)/bin/python tests/oracle/make_oracle.py --compare tests/oracle $(FAMILIES)

clean:
	rm -rf $(VENV) $(ORACLE) .colibri .pytest_cache .ruff_cache .hypothesis build dist

# What is missing is named before anything is tried; a Python alone suffices to find that out.
preflight preflight-test:
	@command -v "$(PYTHON)" >/dev/null || { echo "colibri: missing: no $(PYTHON) on PATH; install Python 3.10 or newer" \
		"or name the one to use: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -I colibri_lab/preflight.py $(if $(ZIG),--zig) $(if $(findstring test,$@),--browser)

$(VENV)/bin/python $(ORACLE)/bin/python:
	@echo "making $(@:/bin/python=) with $(PYTHON)"
	@"$(PYTHON)" -m venv "$(@:/bin/python=)"

$(VENV)/lab.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "installing colibri-lab and what it needs (a few minutes the first time)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check -e "$(if $(ZIG),.[zig],.)"
	@touch $@

$(VENV)/test.stamp: $(VENV)/lab.stamp
	@echo "installing what the tests need"
	@$(RUN) -m pip install --quiet --disable-pip-version-check -e ".[test]"
	@touch $@

$(ORACLE)/oracle.stamp: pyproject.toml | $(ORACLE)/bin/python
	@echo "installing torch and transformers (some GB)"
	@$(ORACLE)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[oracle]"
	@touch $@
