"""The GPU kernels of the layers, against torch and the limit of the hardware.

    python -m baton.bench.kernels --device cuda [--json PATH]     all kernels, Llama-3.1-8B's shapes, bfloat16
    python -m baton.bench.kernels --device cuda --model-shape qwen3-30b-a3b   those of a mixture of experts
    python -m baton.bench.kernels --device cuda --model-shape bamba-9b        those of state layers
    python -m baton.bench.kernels --device cuda --quantization fp8|int4       those of quantized weights

`cases`, `moe`, `mamba2` and `quantized` say what each kernel and torch compute, and how many
bytes and operations that takes. Times are of replayed CUDA graphs. The input sets of a
case together exceed the L2 cache. Bytes count each input and output once; operations exclude what causality
makes unnecessary. A kernel that bandwidth limits has rows in GB/s, one that arithmetic limits in TFLOP/s.
`of_limit` is its share of an H200's limit.
"""
