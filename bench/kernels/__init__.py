"""Each GPU kernel of the engine and of KV transfer beside torch's own and the hardware's limit.

    python -m bench.kernels --device cuda [--json PATH]     all kernels, Llama-3.1-8B's shapes, bfloat16
    python -m bench.kernels --device cuda --sweep           times of some kernels by their constants

`cases` says what is done, on both sides, and how many bytes and operations that takes; `measure` how long.
Times are of replayed CUDA graphs, over input sets that together exceed the L2 cache. Bytes are those that
must move (each input read once, each output written once), operations those that causality leaves. What a
kernel is bound by, bandwidth or arithmetic, decides in which unit it is told.
"""
