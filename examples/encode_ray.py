r"""Run `neobert encode` on a Ray cluster, in shards whose workers may fail.

    pip install '.[eval,ray]'
    python examples/encode_ray.py s3://bucket/corpus s3://bucket/embeddings --model MODEL \
        --shards 512 --gpus 1
    python examples/encode_ray.py corpus/ embeddings/ --model MODEL --shards 64 --cores 4

A shard is what `neobert encode ... --shard i/n` encodes, with all its options. Ray runs the shard
of a failed worker again, which encodes the missing parts with identical results. Running the same
command again does so, too. Use several shards per worker to keep all workers busy.
"""

import argparse
from dataclasses import replace

import ray
import torch

from neobert.common.scripts import run_script
from neobert.encoding.command import EncodeSummary, encode
from neobert.encoding.options import OPTIONS, EncodeOptions


def encode_shard(options: EncodeOptions, shard: int, num_shards: int, cores: int) -> EncodeSummary:
    """Encode one shard, and return its summary."""
    # By default torch uses all cores of the machine, also those of other workers.
    torch.set_num_threads(cores)
    inference = replace(options.inference, shard=f"{shard}/{num_shards}")
    return encode(replace(options, inference=inference), progress_bar=False)


def main(argv: list[str] | None = None) -> None:
    """Encode a corpus on a Ray cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # The other arguments are the options of `neobert encode`.
    parser.add_argument(
        "--shards", type=int, default=8, help="Number of shards. (default: %(default)s)"
    )
    parser.add_argument(
        "--cores", type=int, default=1, help="CPU cores per worker. (default: %(default)s)"
    )
    parser.add_argument(
        "--gpus", type=float, default=0, help="GPUs per worker. (default: %(default)s)"
    )
    args, rest = parser.parse_known_args(argv)

    options = OPTIONS["encode"].read(rest)
    # The cluster chooses the device, not a launcher of this script.
    inference = replace(options.inference, device="cuda" if args.gpus else "cpu")
    options = replace(options, inference=inference)

    # Retry without a limit: workers on preemptible machines fail at any time.
    remote_encode = ray.remote(num_cpus=args.cores, num_gpus=args.gpus, max_retries=-1)(
        encode_shard
    )
    running = [
        remote_encode.remote(options, shard, args.shards, args.cores)
        for shard in range(args.shards)
    ]
    while running:
        done, running = ray.wait(running)
        summary = ray.get(done[0])
        print(f"{summary.encoded_texts:,} texts in a shard; {len(running)} shards are left")

    # All parts exist now, so this call only completes the output.
    summary = encode_shard(options, 0, 1, args.cores)
    print(summary.describe(options.corpus.output))


if __name__ == "__main__":
    run_script(main)
