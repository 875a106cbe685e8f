"""One rank on one device: runs steps of plain arrays (`engine.step`) and samples their tokens.

Holds the runner, CUDA graphs, the sampler, and the planning of memory. Knows nothing of requests and
scheduling, and imports nothing of `engine.core`.
"""
