#!/usr/bin/env bash
# Everything that needs a GPU, in under 9 minutes on an H100: tests, throughput, compiled blocks, memory, profile, training steps.
#
#   bash benchmarks/gpu.sh                # or: make gpu
#   OUT=/some/folder bash benchmarks/gpu.sh
#   bash benchmarks/gpu.sh --rehearse     # the same on the CPU, tiny, with stand-ins for what only CUDA has
#
# Installs nothing and needs no network: Python with torch, transformers, msgspec and pytest is enough. Finished steps are kept in $OUT (results/gpu
# otherwise); called again it goes on where it stopped. A copy without git tells its commit by NEOBERT_COMMIT=abc1234.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# The package is found under its name by a link, so that nothing has to be installed.
link="$(mktemp -d)"
trap 'rm -rf "$link"' EXIT
ln -s "$root" "$link/neobert"
export PYTHONPATH="$link${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
cd "$root"
"${PYTHON:-python3}" -m neobert.benchmarks.gpu --output "${OUT:-results/gpu}" "$@"
