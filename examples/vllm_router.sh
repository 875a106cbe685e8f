#!/usr/bin/env bash
# Serves MODEL at port 8000 with Baton's router: Baton's engine prefills on one GPU, vLLM decodes on another.
#
#     bash examples/vllm_router.sh MODEL
set -euo pipefail
options=(--model "$1" --dtype "${DTYPE:-bfloat16}")  # vLLM's `auto` differs from Baton's if the weights are float32
trap 'kill $(jobs -p); wait' EXIT
BATON_CLUSTER_SECRET=$(openssl rand -hex 32)
export BATON_CLUSTER_SECRET

CUDA_VISIBLE_DEVICES=0 baton prefill "${options[@]}" --port 7001 &
CUDA_VISIBLE_DEVICES=1 baton decode "${options[@]}" --engine vllm --port 7011 &
baton router --worker 127.0.0.1:7001 --worker 127.0.0.1:7011 --port 8000
