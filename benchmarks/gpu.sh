#!/usr/bin/env bash
# Run everything that needs a GPU, in under 20 minutes on an H100: tests, throughput, compiled blocks, memory, training steps.
#
#   bash benchmarks/gpu.sh                # or: make gpu
#   OUT=/some/folder bash benchmarks/gpu.sh
#   bash benchmarks/gpu.sh --rehearse     # the same commands on the CPU, tiny
#
# The script installs nothing and needs no network: Python with torch, transformers, msgspec and pytest is sufficient. The results are written to
# $OUT (by default runs/gpu), and a second call runs the steps that have not finished. Set NEOBERT_COMMIT=abc1234 for a copy without git.
set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# The package is imported from the clone, so that nothing has to be installed.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
cd "$root"
python="${PYTHON:-python3}" failed=0
if [ "${1:-}" = --rehearse ]; then
    out="${OUT:-.cache/gpu-rehearsal}" end=$((SECONDS + 3600))
    export TORCH_COMPILE_DISABLE=1 # it needs a C++ compiler
    tests="--collect-only"
    speed="--device cpu --layers 1 --sets short --max-batch 2 --repeats 2 --warmup 1"
    peak="--device cpu --layers 1 --lengths 128 --batch 1"
    steps="--device cpu --hidden 64 --layers 1 --tokens 32 --steps 1"
elif "$python" -c "import sys, torch, transformers, msgspec, pytest; sys.exit(not torch.cuda.is_available())"; then
    out="${OUT:-runs/gpu}" end=$((SECONDS + 1200)) tests="" speed="" peak="" steps=""
else
    echo "gpu.sh needs a GPU and the packages torch, transformers, msgspec and pytest. --rehearse runs the same commands on the CPU." >&2
    exit 2
fi
mkdir -p "$out"

# step NAME SECONDS MODULE OPTIONS: run a module and write its output to NAME.log. A failed step does not stop the others.
step() {
    local name=$1 limit=$2 left=$((end - SECONDS))
    shift 2
    if [ -e "$out/$name.done" ]; then
        echo "$name: done before"
    elif [ "$left" -lt 20 ]; then
        echo "$name: left for the next call"
        failed=1
    else
        rm -rf "${out:?}/$name"
        timeout $((limit < left ? limit : left)) "$python" -m "$@" >"$out/$name.log" 2>&1
        local code=$?
        [ $code = 0 ] && touch "$out/$name.done" || failed=1
        echo "$name: exit code $code, $out/$name.log"
    fi
}

# Throughput of NeoBERT and ModernBERT base: NAME SECONDS OPTIONS.
throughput() {
    step "$1" "$2" neobert throughput --output "$out/$1" --preset gpu --models neobert modernbert-base --repeats 7 --warmup 2 "${@:3}" $speed
}

for file in attention packing; do # all with tests marked gpu; the others need datasets
    step "test_$file" 120 pytest -q -m gpu -p no:cacheprovider --tb=short $tests "tests/model/test_$file.py"
done
throughput long 100 --implementations sdpa --sets 4096 8192
throughput variable 110 --implementations sdpa padded --sets normal-256 normal-4096 short
throughput lengths 90 --implementations sdpa --sets 512 1024 2048
throughput compiled 150 --implementations compiled --sets 2048 4096 8192
step memory 300 benchmarks.memory --output "$out/memory" --device cuda --layers 0 --lengths 4096 8192 --batch 8 $peak
for sets in "short" "1024 4096"; do
    if [ "$sets" = short ]; then
        # Only this workload has padding. With 16,384 tokens, the padded layout needs more than 80 GB.
        ways="packed padded" tokens=4096
    else
        ways=packed tokens=16384
    fi
    step "training_${sets// /_}" 200 benchmarks.training --output "$out/training_${sets// /_}" --sets $sets --ways $ways --dtypes bfloat16 \
        --device cuda --hidden 768 --layers 28 --tokens "$tokens" --steps 12 --repeats 1 $steps
done
"$python" -m benchmarks.gpu "$out" || failed=1
exit $failed
