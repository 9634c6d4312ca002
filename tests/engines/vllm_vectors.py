"""vLLM itself, in an environment of its own: FOLDER POOLING MODE LONGEST, a JSON list of texts on
stdin; answers one line of JSON.

POOLING is "MEAN" or "CLS", or "folder" for what vLLM reads in the folder; MODE is "eager" or
"compiled"; LONGEST is the most tokens of a text. All texts are handed over at once: the engine
batches them as it likes.
"""

import json
import os
import sys


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import vllm  # noqa: E402
from vllm.config import PoolerConfig  # noqa: E402


def main():
    folder, pooling, mode, longest = sys.argv[1:]
    options = {} if pooling == "folder" else {"pooler_config": PoolerConfig(pooling_type=pooling)}
    engine = vllm.LLM(
        folder,
        runner="pooling",
        convert="embed",
        trust_remote_code=True,
        dtype="float32",
        max_model_len=int(longest),
        gpu_memory_utilization=0.1,  # of the machine's memory, on the CPU
        enforce_eager=mode == "eager",
        **options,
    )
    vectors = [answer.outputs.embedding for answer in engine.embed(json.load(sys.stdin))]
    print(json.dumps({"vectors": vectors, "version": vllm.__version__}), flush=True)


if __name__ == "__main__":
    main()
