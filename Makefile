# Every target creates $(VENV) on first use, and installs again only when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
# On a GPU: CUDA=cuda13 (or cuda12). Further arguments of the command: ARGS="...".
CUDA ?=
ARGS ?=
# The benchmarks of `make bench`. With ARGS, name one: each has its own options.
BENCH ?= grouped_matmul linear_cross_entropy adaln packed_attention quantize fp8_matmul fp8_grouped_matmul route router permute moe modality_grouped_matmul unseen_shapes train_step

BIN := $(VENV)/bin
comma := ,
with_cuda := $(if $(CUDA),$(comma)$(CUDA))

.PHONY: help demo demo-dit demo-mm test lint docs mutate bench tune clean

help:  ## print these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Large pages for malloc: XLA allocates a step's temporaries at each call, and Linux zeroes them page by page.
demo demo-dit demo-mm: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

demo: $(VENV)/.has-models$(with_cuda)  ## train a small mixture-of-experts language model
	$(BIN)/python -m models.train lm $(ARGS)

demo-dit: $(VENV)/.has-models$(with_cuda)  ## train a small diffusion transformer on packed images of unequal sizes
	$(BIN)/python -m models.train dit $(ARGS)

demo-mm: $(VENV)/.has-models$(with_cuda)  ## train a small transformer on text and images: it draws digits and captions them
	$(BIN)/python -m models.train mm $(ARGS)

test: $(VENV)/.has-test$(with_cuda)  ## every test that this machine can run
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/.has-test$(with_cuda)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.has-docs  ## the documentation and the API reference, as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)

# The mutated file must be on disk, since Triton reads sources: all runs in a copy of what git tracks.
mutate: $(VENV)/.has-test,mutate$(with_cuda)  ## change one operator or number at a time, list what no test sees: FILE=jaxops/ops/route/xla.py TESTS=tests/ops/route
	@test -f "$(FILE)" && test -n "$(TESTS)" || { echo "name both, FILE= and TESTS="; exit 2; }
	@copy=$$(mktemp -d); trap 'rm -rf "$$copy"' EXIT; git ls-files -z | xargs -0 cp --parents -t "$$copy"; cd "$$copy"; \
	export CI=true PYTHONPATH="$$copy" JAX_COMPILATION_CACHE_DIR="$$copy/.jax" PATH="$(abspath $(BIN)):$$PATH"; \
	sed 's|"FILE"|"$(FILE)"|; s|PYTHON|$(abspath $(BIN))/python|; s|TESTS"|$(TESTS)"|' tests/mutation.toml >config.toml; \
	cosmic-ray baseline config.toml && cosmic-ray init config.toml session && cr-filter-operators session config.toml && \
	cosmic-ray exec config.toml session && cr-report --surviving-only --show-diff session

bench: $(VENV)/.has-bench$(with_cuda)  ## measure on the GPU, beside every peer that can be imported: BENCH=adaln ARGS="--shapes t65536_d3072"
	@failed=0; for name in $(BENCH); do $(BIN)/python -m benchmarks $$name $(ARGS) || failed=1; done; exit $$failed

tune: $(VENV)/.has-bench$(with_cuda)  ## tune a shape for this GPU: ARGS="grouped-matmul --shape 8,32768,4096,14336"
	$(BIN)/python -m jaxops.tuning $(ARGS)

clean:  ## remove $(VENV) and site/
	rm -rf $(VENV) site

# --no-compile saves half a minute: Python compiles only what it imports. It must be allowed to store that, or each
# process of a test run compiles it again.
export PYTHONDONTWRITEBYTECODE :=
$(VENV)/.has-%: pyproject.toml
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing jaxops[$*] into $(VENV)"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --editable '.[$*]'
	@touch $@
