"""The engine process' half of a transfer: what is copied, when, and by which rank. No sockets to peers.

- `sender` takes the slices of what the engine sends (`outgoing`) in turn (`turns`), and gathers them.
- `receiver` scatters the slices that arrived. `pulls` are copies from memory that peers export.
- With several ranks, rank 0 gives orders (`ranked_pool`) to the other ranks (`rank_copier`).
"""
