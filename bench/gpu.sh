#!/usr/bin/env bash
# Everything of Baton that wants a GPU, on a machine with torch and without network: tests, then benches.
#
#   bench/gpu.sh [--wheels DIR] [--out DIR] [STEP ...]
#
# STEP: tests kernels engine fp8 fp8_kv int4 moe latent hybrid windows exact drafts kv overlap elastic disagg agents flip reuse ranks
# (default: all, in this order; the last six where there are two GPUs), overlap_8000, store (needs Mooncake), vllm, vllm_kinds (need vLLM),
# groups (two GPUs, which the workers then share, or more), images (three), disagg_70b (four).
# DIR of --wheels holds the Python packages that the machine lacks. One GPU or two: with two, prefill has the first and
# decode the second. A step that fails does not stop the others; the exit status says how many did.
set -uo pipefail
cd "$(dirname "$0")/.."
wheels= out=gpu-results steps=()
while (($#)); do
    case $1 in
        --wheels) wheels=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        -*) echo "bench/gpu.sh: unknown option $1" >&2; exit 2 ;;
        *) steps+=("$1"); shift ;;
    esac
done
if ! ((${#steps[@]})); then
    steps=(tests kernels engine fp8 fp8_kv int4 moe latent hybrid windows exact drafts kv overlap)
    (($(nvidia-smi --list-gpus | wc -l) < 2)) || steps+=(elastic disagg agents flip reuse ranks)
fi
mkdir -p "$out"
if [[ $wheels ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl || exit 2
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpus.txt"

tests() {
    BATON_TEST_DEVICE=cuda python3 -m pytest -m 'not long' \
        tests/engine tests/kv_transfer tests/decode_worker/test_tokens.py
}
kernels() {
    python3 -m baton.bench.kernels --device cuda --json "$out/kernels.json"
    python3 -m baton.bench.kernels --device cuda --model-shape qwen3-30b-a3b --json "$out/moe_kernels.json"
}
engine() { python3 -m baton.bench.engine --device cuda --json "$out/engine.json"; }
fp8() {
    python3 -m baton.bench.engine --device cuda --quantization fp8 --json "$out/fp8.json"
    python3 -m baton.bench.engine --device cuda --model-shape qwen3-30b-a3b --quantization fp8 --json "$out/fp8_moe.json"
    python3 -m baton.bench.kernels --device cuda --quantization fp8 --json "$out/fp8_kernels.json"
}
hybrid() {
    python3 -m baton.bench.elastic --device cuda --json "$out/elastic.json"
    for shape in bamba-9b granite-4.0-h-tiny; do
        python3 -m baton.bench.engine --device cuda --model-shape $shape --json "$out/$shape.json"
        python3 -m baton.bench.overlap --device cuda --model-shape $shape --tokens 2000 --tokens 8000 --batch 32 \
            --long 128000 --json "$out/overlap_$shape.json"
    done
    python3 -m baton.bench.overlap --device cuda --long 128000 --json "$out/overlap_long.json"
    python3 -m baton.bench.kernels --device cuda --model-shape bamba-9b --json "$out/bamba_kernels.json"
}
windows() {
    local shape
    for shape in gpt-oss-20b gemma-4-e4b; do
        python3 -m baton.bench.engine --device cuda --model-shape $shape --json "$out/$shape.json"
        python3 -m baton.bench.engine --device cuda --model-shape $shape --positions --json "$out/positions_$shape.json"
    done
}
fp8_kv() {
    python3 -m baton.bench.engine --device cuda --kv-cache-dtype fp8 --json "$out/fp8_kv.json"
    python3 -m baton.bench.engine --device cuda --quantization fp8 --kv-cache-dtype fp8 --json "$out/fp8_fp8_kv.json"
    for prefill in auto fp8; do
        python3 -m baton.bench.overlap --device cuda --prefill-kv-cache-dtype $prefill --decode-kv-cache-dtype fp8 \
            --json "$out/overlap_$prefill-to-fp8.json"
    done
}
int4() {
    python3 -m baton.bench.engine --device cuda --quantization int4 --json "$out/int4.json"
    python3 -m baton.bench.kernels --device cuda --quantization int4 --json "$out/int4_kernels.json"
}
moe() { python3 -m baton.bench.engine --device cuda --model-shape qwen3-30b-a3b --json "$out/moe.json"; }
latent() {
    python3 -m baton.bench.engine --device cuda --model-shape glm-4.7-flash --json "$out/latent.json"
    python3 -m baton.bench.engine --device cuda --model-shape glm-4.7-flash --quantization fp8 --json "$out/fp8_latent.json"
    python3 -m baton.bench.kernels --device cuda --model-shape glm-4.7-flash --json "$out/latent_kernels.json"
    python3 -m baton.bench.engine --device cuda --model-shape deepseek-v3.2-4-layers --quantization fp8 --positions --json "$out/fp8_sparse.json"
}
exact() {
    python3 -m baton.bench.engine --device cuda --batch-invariant --json "$out/exact.json"
    python3 -m baton.bench.engine --device cuda --quantization fp8 --batch-invariant --json "$out/exact_fp8.json"
    python3 -m baton.bench.engine --device cuda --model-shape qwen3-30b-a3b --batch-invariant --json "$out/exact_moe.json"
    local chaos='python3 -m baton.bench.chaos --device cuda --short --tokens 100000'
    $chaos --batch-invariant --logs "$out/exact_chaos" --json "$out/exact_chaos.json"
    $chaos --logs "$out/exact_control" --json "$out/exact_control.json" # without the flag tokens should differ
}
drafts() {
    python3 -m baton.bench.speculation --device cuda --json "$out/drafts.json"
    python3 -m baton.bench.speculation --device cuda --method eagle3 --json "$out/eagle.json"
}
store() { python3 -m baton.bench.store --device cuda --json "$out/store.json"; }
vllm() {
    python3 -m baton.bench.vllm --device cuda --rates 4,8,12 --logs "$out/vllm" --json "$out/vllm.json"
}
vllm_kinds() { # on one GPU: a handover of each kind of cache that vLLM registers, five at a time, and a line for each
    export BATON_TEST_DEVICE=cuda
    python3 -m pytest --collect-only -m gpu tests/vllm_worker/test_kinds.py | grep :: | xargs -P 5 -I{} bash -c '
        log=$1/vllm_kinds_$(tr -c "[:alnum:]\n" _ <<< "${0##*::test_tokens_}").log
        timeout --signal INT 540 python3 -m pytest -rA "$0" > "$log" 2>&1
        status=$?
        ((status)) && said=FAILED || said=ok
        echo "$said ${0##*::}: $(grep -m1 -E "^E  |Error: |Exception: |answers are|^SKIPPED" "$log" || echo "see $log")"
        exit $status' {} "$out"
}
kv() { python3 -m baton.bench.kv --json "$out/kv.json"; }
overlap() {
    python3 -m baton.bench.overlap --device cuda --batch 32 --batch 64 --json "$out/overlap.json"
    python3 -m baton.bench.overlap --device cuda --kv-connector auto --batch 64 --json "$out/overlap_auto.json"
}
elastic() { # a handover with elastic memory, against the same without
    local shape memory
    for shape in bamba-9b gpt-oss-20b gemma-4-e4b; do
        for memory in elastic-memory no-elastic-memory; do
            python3 -m baton.bench.overlap --device cuda --model-shape $shape --$memory --tokens 2000 --tokens 8000 \
                --batch 32 --json "$out/overlap_${shape}_$memory.json"
        done
    done
}
overlap_8000() { python3 -m baton.bench.overlap --device cuda --tokens 8000 --batch 64 --json "$out/overlap_8000.json"; }
disagg() { # Baton with a prefill and a decode worker, against Baton with two workers that do both
    python3 -m baton.bench.disagg --device cuda --seeds 1 --seconds 20 --reports "$out/disagg" \
        --loads 2000/150,8000/200,500/500,200/20,30000/100,saturated,swing --json "$out/disagg.json"
}
agents() { # the same two deployments
    python3 -m baton.bench.disagg --device cuda --seeds 1 --loads agents --reports "$out/agents" --json "$out/agents.json"
}
groups() { # a handover between workers with several GPUs
    local prefill decode tokens
    while read -r prefill decode; do
        for tokens in 2000 8000; do
            python3 -m baton.bench.overlap --device cuda --prefill-ranks "$prefill" --decode-ranks "$decode" \
                --tokens "$tokens" --batch 32 --json "$out/overlap_${prefill}to${decode}_$tokens.json" </dev/null
        done
    done <<< $'2 1\n1 2\n2 2'
}
images() { # on three GPUs: an encoder of its own, against workers that encode
    python3 -m baton.bench.images --device cuda --seeds 1 --json "$out/images.json"
}
disagg_70b() { # on four GPUs
    local serve='python3 -m baton.cluster.cli serve --model {model} --load-format dummy --max-model-len 33000'
    serve+=' --tensor-parallel-size 2 --port {port}'
    python3 -m baton.bench.disagg --device cuda --model-shape llama-3.1-70b --seeds 1 --loads 2000/150 --rates 1,2 \
        --requests 60 --side "1p1d 1 $serve" --side "colocated 1 $serve --prefill 0 --decode 2" \
        --reports "$out/disagg_70b" --json "$out/disagg_70b.json"
}
reuse() { python3 -m baton.bench.reuse --device cuda --json "$out/reuse.json"; }
flip() { python3 -m baton.bench.flip --device cuda --logs "$out/flip" --json "$out/flip.json"; }

ranks() {
    local size
    for size in 2 4 8; do
        (($(nvidia-smi --list-gpus | wc -l) < size)) ||
            {
                python3 -m baton.bench.engine --device cuda --tensor-parallel-size "$size" --json "$out/ranks$size.json"
                python3 -m baton.bench.engine --device cuda --tensor-parallel-size "$size" \
                    --model-shape qwen3-30b-a3b --json "$out/moe_ranks$size.json"
            }
    done
}

failed=0
for step in "${steps[@]}"; do
    echo "== $step"
    "$step" 2>&1 | tee "$out/$step.log"
    ((PIPESTATUS[0] == 0)) || { echo "== $step FAILED"; ((failed += 1)); }
done
exit "$failed"
