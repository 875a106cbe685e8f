"""Small towers of each family. A token is an area of 8 × 8 pixels."""

from typing import Any

from baton.vision.images import ImageSettings

QWEN = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 4, "num_position_embeddings": 16, "initializer_range": 0.4,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "image_size": 32, "patch_size": 4, "vision_use_head": False,
    "initializer_range": 0.4,
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_vision", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32, "patch_size": 4,
    "pooling_kernel_size": 2, "position_embedding_size": 64, "standardize": True,
    "use_clipped_linears": True, "initializer_range": 0.4,
}  # fmt: skip
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**QWEN, "embed_dim": 16, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {**QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**QWEN, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": QWEN,
    "gemma3": {"vision_config": SIGLIP, "text_config": {"hidden_size": 64}, "mm_tokens_per_image": 16},
    "gemma4": {"vision_config": GEMMA4, "text_config": {"hidden_size": 64}},
}
"""As `VisionConfig.tower`, by `model_type`. Each has two layers."""
SETTINGS = ImageSettings(7, 4, 2, 2, 64, 4096, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
SQUARE = 32, 32
SIZES = {"gemma3": [SQUARE]}
"""Height and width in pixels, of towers for which not every size is right."""
EACH_SIZE = [(16, 40), (24, 8), (16, 40)]
