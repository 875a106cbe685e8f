"""How fast one engine is: `python -m bench.engine`.

On a CPU (`on_cpu`) the embedded model runs against transformers, interleaved. On a GPU (`on_cuda`) the 8B
Llama shape runs with random weights; beside each figure stands the *floor* (`floor`): what the plain GEMMs of
that work take in the same process on the same card, by cuBLAS, plus the time to read its KV.
"""
