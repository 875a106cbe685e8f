"""The engine's interface as plain data: requests, sampling parameters, outputs, statistics, configuration.

Each type is defined once, here. Knows nothing of tensors, devices and scheduling, and imports no torch.
"""
