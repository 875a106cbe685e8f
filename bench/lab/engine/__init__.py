"""How fast one engine is: `python -m baton.bench.engine`.

On a CPU (`on_cpu`) the embedded model runs in turns with transformers. On a GPU (`on_gpu`) a model's shape
runs with random weights: by default that of Llama 3.1 8B, else a mixture of experts, or a model with state
layers or windows. Each figure has a floor, measured on the same card in the same process (`floor`), or
computed from the bytes. With `--tensor-parallel-size` an engine over several devices runs against the same
engine on one (`on_ranks`).
"""
