"""Decides what each step computes: the scheduler, the block pool with its prefix cache, the chunk limit.

Holds the state of live requests and turns a schedule into a step of plain arrays. Pure: knows nothing of
tensors, devices, models and sockets, and imports no torch.
"""
