"""Qwen2 and Qwen2.5, dense: Llama with biases on query, key and value."""

from baton.engine.models.llama import Llama, LlamaAttention


class Qwen2Attention(LlamaAttention):
    qkv_bias = True


class Qwen2(Llama):
    attention = Qwen2Attention
