"""Copies of whole blocks of a KV cache, for the tiers below the device: memory of the host, and its disk.

A tier of the engine decides what is copied, loaded and dropped. A store here copies: `block_store` to memory
of the host (`cuda_store` from a GPU), `ranked_store` on all ranks of an engine, `disk_store` to a file.
"""
