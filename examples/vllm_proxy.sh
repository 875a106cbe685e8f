#!/usr/bin/env bash
# Serves MODEL at PORT (8000) with two vLLM servers: BatonConnector moves KV between them. The prefill server has the
# GPUs of PREFILL_GPUS (0), the decode server those of DECODE_GPUS (1). With several, as 0,1, the weights are shared out.
#
#     bash examples/vllm_proxy.sh MODEL PROXY
#
# PROXY was made for NixlConnector. vLLM's source has one: tests/v1/kv_connector/nixl_integration/toy_proxy_server.py
set -euo pipefail
model=$1 proxy=$2 port=${PORT:-8000}
trap 'kill $(jobs -p); wait' EXIT

start() {  # GPUs, port, kv_role
    local gpus=${1//[^,]/}
    CUDA_VISIBLE_DEVICES=$1 ${SERVE:-vllm serve} "$model" --port "$2" --tensor-parallel-size $((${#gpus} + 1)) \
        --kv-transfer-config '{
        "kv_connector": "BatonConnector", "kv_connector_module_path": "baton.vllm_worker.connector",
        "kv_role": "'"$3"'", "kv_load_failure_policy": "recompute"}' &
}

start "${PREFILL_GPUS:-0}" $((port + 100)) kv_producer
start "${DECODE_GPUS:-1}" $((port + 200)) kv_consumer
for each in $((port + 100)) $((port + 200)); do
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$each/health"; do
        [ "$(jobs -pr | wc -l)" = 2 ]  # else one has ended
        sleep 1
    done
done
"${PYTHON:-python3}" "$proxy" --port "$port" --prefiller-port $((port + 100)) --decoder-port $((port + 200))
