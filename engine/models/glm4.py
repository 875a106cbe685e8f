"""GLM-4, dense: Llama with norms after attention and after the MLP too, and no bias of attention's output."""

from baton.engine.models.llama import Llama, LlamaAttention, Norms


class Glm4Attention(LlamaAttention):
    out_bias = False


class Glm4(Llama):
    attention = Glm4Attention
    norms = Norms(after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
