"""How fast one engine is: `python -m baton.bench.engine`.

On a CPU (`on_cpu`) the embedded model runs in turns with transformers. On a GPU (`on_cuda`) the 8B Llama
shape runs with random weights. Each figure has a *floor* (`floor`): the time of the plain GEMMs of that work
by cuBLAS, plus the time to read the KV. It is measured on the same card in the same process. With
`--quantization fp8|int4` the weights are quantized (`on_quantized`). With `--model-shape qwen3-30b-a3b` it is
a mixture of experts (`on_moe`), with the time to read its bytes as the floor. With `--model-shape bamba-9b`
or `granite-4.0-h-tiny` it is a model with state layers (`on_hybrid`). With `--tensor-parallel-size` an engine
over several devices runs against the same engine on one (`on_ranks`).
"""
