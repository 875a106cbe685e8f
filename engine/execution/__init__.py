"""One rank on one device: runs steps of plain arrays (`engine.step`) and samples their tokens.

    start ──▶ rank 0: the engine calls run and sample ──▶ stop
          └─▶ other ranks: `rank.Follower` calls run and sample as rank 0 does ──▶ stop

Holds the runner, CUDA graphs, the sampler, the sizing of memory, and what ranks exchange. Knows nothing of
requests and scheduling, and imports nothing of `engine.core`.
"""
