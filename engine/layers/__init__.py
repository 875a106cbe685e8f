"""The parts that models are built of: linear products, norms, rotary embedding, MLP, and weight loading.

Formats of weights belong here. Knows nothing of requests and the KV pool; of a step, only `current_step`.
"""
