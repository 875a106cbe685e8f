"""Model shapes for `--load-format dummy`: directories that hold only a config.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from baton.bench.load.target.tokenization import WORDS
from baton.cluster.tools.sizing import MODELS

DENSE, MOE = "llama-3.1-8b", "qwen3-30b-a3b"
"""What benches of one GPU measure by default, and what they measure of mixtures of experts."""

BAMBA, GRANITE, NEMOTRON = "bamba-9b", "granite-4.0-h-tiny", "nemotron-h-8b"
LATENT = "glm-4.7-flash"
SPARSE = "deepseek-v3.2-4-layers"
"""One layer is dense: with FP8 weights 39 GB."""

GATED_DELTA, KIMI_DELTA = "qwen3.5-35b-a3b", "kimi-linear-48b-a3b"
HYBRIDS = BAMBA, GRANITE, NEMOTRON, GATED_DELTA, KIMI_DELTA
"""Models with state layers."""

GPT_OSS, GEMMA = "gpt-oss-20b", "gemma-4-e4b"
WINDOWED = GPT_OSS, GEMMA
"""Models with windows: a mixture of experts, and one whose last layers read the KV of others."""

SEEING = "qwen3-vl-8b"
"""A model that takes images."""
SEEING_ON = {"cpu": "small-qwen3-vl", "cuda": SEEING}
"""By device, what benches of images measure by default."""

SHAPES: dict[str, dict[str, Any]] = MODELS | {
    file.stem: json.loads(file.read_text()) for file in sorted(Path(__file__).with_name("models").iterdir())
}
"""The config.json of each shape, by its name."""
SHAPES["llama-3.1-8b-two-layers"] = SHAPES[DENSE] | {"num_hidden_layers": 2}
SHAPES["qwen3-30b-a3b-12-layers"] = SHAPES[MOE] | {"num_hidden_layers": 12}  # four workers share a GPU


OF_IMAGES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
"""The tokens of Qwen3-VL for images."""
OF_PATCHES = {
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "processor_class": "Qwen3VLProcessor",
}  # fmt: skip
PROCESSORS = {
    "preprocessor_config.json": {
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    "video_preprocessor_config.json": {
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
}
"""Of Qwen3-VL, as published, less `OF_PATCHES`. Other engines read the second, too."""
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }} {% else %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write_shape(name: str, directory: Path, *, tokenizer: bool = False) -> Path:
    """Writes `directory`/`name`, which `--model` accepts with `--load-format dummy`. Returns its path.

    With `tokenizer` a router can serve the model: every token id is a word. The words of load tests are among
    them, since unknown words are one and the same token, and prompts of it would share their KV. A model that
    takes images gets the files of its processor, too.
    """
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    if tokenizer:
        shape = SHAPES[name]
        count = shape.get("text_config", shape)["vocab_size"]
        words = [*dict.fromkeys(("w0", *WORDS, *(f"w{i}" for i in range(1, count))))][:count]
        of_images = {
            shape[f"{key}_id"]: special for key, special in OF_IMAGES.items() if f"{key}_id" in shape
        }
        for token, special in of_images.items():
            words[token] = special
        codec = Tokenizer(WordLevel({word: token for token, word in enumerate(words)}, unk_token="w0"))
        codec.add_special_tokens([*of_images.values()])
        if of_images:
            for file, settings in PROCESSORS.items():
                (folder / file).write_text(json.dumps(settings | OF_PATCHES))
            (folder / "chat_template.jinja").write_text(TEMPLATE)
        codec.pre_tokenizer = WhitespaceSplit()  # pyrefly: ignore[read-only]
        codec.decoder = ByteLevel()  # pyrefly: ignore[read-only]
        codec.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | (OF_IMAGES if of_images else {})
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
