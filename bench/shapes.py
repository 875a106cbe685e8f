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

BAMBA, GRANITE = "bamba-9b", "granite-4.0-h-tiny"
LATENT = "glm-4.7-flash"
SPARSE = "deepseek-v3.2-4-layers"
"""One layer is dense: with FP8 weights 39 GB."""

GATED_DELTA, KIMI_DELTA = "qwen3.5-35b-a3b", "kimi-linear-48b-a3b"
HYBRIDS = BAMBA, GRANITE, GATED_DELTA, KIMI_DELTA
"""Models with state layers."""

SHAPES: dict[str, dict[str, Any]] = MODELS | {
    file.stem: json.loads(file.read_text()) for file in sorted(Path(__file__).with_name("models").iterdir())
}
"""The config.json of each shape, by its name."""
SHAPES["llama-3.1-8b-two-layers"] = SHAPES[DENSE] | {"num_hidden_layers": 2}
SHAPES["qwen3-30b-a3b-12-layers"] = SHAPES[MOE] | {"num_hidden_layers": 12}  # four workers share a GPU


def write_shape(name: str, directory: Path, *, tokenizer: bool = False) -> Path:
    """Writes `directory`/`name`, which `--model` accepts with `--load-format dummy`. Returns its path.

    With `tokenizer` a router can serve the model: every token id is a word. The words of load tests are among
    them, since unknown words are one and the same token, and prompts of it would share their KV.
    """
    where = directory / name
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    if tokenizer:
        count = SHAPES[name]["vocab_size"]
        words = dict.fromkeys(("w0", *WORDS, *(f"w{i}" for i in range(1, count))))
        made = Tokenizer(WordLevel(dict(zip(words, range(count), strict=False)), unk_token="w0"))
        made.pre_tokenizer = WhitespaceSplit()  # pyrefly: ignore[read-only]
        made.decoder = ByteLevel()  # pyrefly: ignore[read-only]
        made.save(str(where / "tokenizer.json"))
        (where / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return where
