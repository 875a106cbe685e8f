"""Writes a tokenizer for clients with transformers: `python -m tests.suites.tokenizer DIRECTORY [GGUF]`.

It is that of a GGUF file, by default of the embedded model.
"""

import json
import sys
from pathlib import Path

from baton.cluster.model import embedded_path
from baton.router.text.model_files import read_gguf


def main(target: str, given: str = "") -> None:
    directory, text = Path(target), read_gguf(Path(given) if given else embedded_path())
    directory.mkdir(exist_ok=True)
    text.tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": text.eos_token,
        "chat_template": text.chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(*sys.argv[1:])
