#!/usr/bin/env bash
# transformers 5.23.0: TextIteratorStreamer takes a space from each line of indented text, with the tokenizer of Llama 2.
#
# Tokenizers such as those of Llama 2 and Mistral 7B put a space before a text and take it away when they decode. The
# streamer empties its cache of tokens after each newline, so it decodes each line by itself. Each line then loses a
# space that the model wrote, and Python code that a user gets as a stream is indented by 3 and 7, while `decode` of
# the same tokens gives 4 and 8. TextStreamer and AsyncTextIteratorStreamer share the code, and the documentation
# does not name it. Tokenizers of bytes (GPT-2, Llama 3, Qwen) take nothing away.
#
# Seen:
#     llama  decode   'def f():\n    if x:\n        return 1\n'
#     llama  streamed 'def f():\n   if x:\n       return 1\n'
#     bytes  decode   'def f():\n    if x:\n        return 1\n'
#     bytes  streamed 'def f():\n    if x:\n        return 1\n'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cat > "$folder/try.py" <<'PY'
import sys

import torch
from transformers import GPT2Tokenizer, LlamaTokenizer, TextIteratorStreamer

TEXT = "def f():\n    if x:\n        return 1\n"
letters = sorted(set(TEXT) - set(" \n"))
pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
byte_pieces = ["<|endoftext|>", "Ġ", "Ċ", *letters]
tokenizers = {
    "llama": LlamaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]),
    "bytes": GPT2Tokenizer(vocab={piece: i for i, piece in enumerate(byte_pieces)}, merges=[]),
}
right = {}
for name, tokenizer in tokenizers.items():
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    streamer = TextIteratorStreamer(tokenizer)
    for token in ids:
        streamer.put(torch.tensor([token]))  # as `generate` does
    streamer.end()
    decoded, streamed = tokenizer.decode(ids), "".join(streamer)
    print(f"{name}  decode   {decoded!r}\n{name}  streamed {streamed!r}")
    assert decoded == TEXT
    right[name] = streamed == TEXT
sys.exit(right != {"llama": False, "bytes": True})
PY
"$folder/venv/bin/python" "$folder/try.py" 2> "$folder/errors" || { tail -5 "$folder/errors"; exit 1; }
