"""`neobert encode` on a Ray cluster: many shares of one corpus, any of whose workers may die.

    pip install '.[eval,ray]'
    python examples/encode_ray.py s3://bucket/corpus s3://bucket/vectors --model MODEL \\
        --shards 512 --gpus 1
    python examples/encode_ray.py corpus/ vectors/ --model MODEL --shards 64 --cores 4

Each share is what `neobert encode ... --shard i/n` does, with all its options. A share whose worker
died is given again and makes the parts that are missing, bit for bit. So does the same command.
Several shares for each worker keep all of them busy to the end.
"""

import argparse
from dataclasses import replace

import ray
import torch

from neobert.common.scripts import run_script
from neobert.encoding.command import described, encode
from neobert.encoding.options import OPTIONS


def share(arguments, number, count, cores):
    """Encodes one share; returns its summary."""
    torch.set_num_threads(cores)
    return encode(replace(arguments, shard=f"{number}/{count}"), progress_bar=False)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--cores", type=int, default=1, help="of a worker")
    parser.add_argument("--gpus", type=float, default=0, help="of a worker")
    options, rest = parser.parse_known_args(argv)
    (arguments,) = OPTIONS["encode"].read(rest)
    # Chosen by the cluster and not by a launcher of this script.
    arguments = replace(arguments, device="cuda" if options.gpus else "cpu")
    work = ray.remote(num_cpus=options.cores, num_gpus=options.gpus, max_retries=-1)(share)
    shares = [
        work.remote(arguments, number, options.shards, options.cores)
        for number in range(options.shards)
    ]
    while shares:
        done, shares = ray.wait(shares)
        summary = ray.get(done[0])
        print(f"{summary['encoded_texts']:,} texts of a share; {len(shares)} shares to come")
    print(described(arguments.output, encode(replace(arguments, shard="0/1"), progress_bar=False)))


if __name__ == "__main__":
    run_script(main)
