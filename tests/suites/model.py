"""Gives a GGUF file of Qwen 2.5 the two tokens of reasoning: `python -m tests.suites.model FROM TO`.

Qwen 2.5 has unused tokens at the ids that <think> and </think> have in Qwen 3. They get those names. A model
that is asked to write </think> writes "</" first: the row of that token, enlarged, makes it </think>.
"""

import sys
from pathlib import Path

import numpy as np

from baton.engine.gguf_header import LENGTH, GGUFHeader
from baton.engine.gguf_tokenizer import USER_DEFINED
from baton.engine.loader.gguf_file import GGUFFile

THINK, END = 151667, 151668
NAMES = {THINK: b"<think>", END: b"</think>"}
CLOSING = "</"
LARGER = 1.15
ALIGNMENT = 32


def main(source: str, target: str) -> None:
    header, model = GGUFHeader(Path(source), vocabulary=True), GGUFFile(Path(source))
    tokens = header.metadata["tokenizer.ggml.tokens"]
    head, data = bytearray(header.data[: header.end]), header.end + -header.end % ALIGNMENT
    weights = bytearray(header.data[data:])
    for name, changed in (("token_embd.weight", (THINK, END)), ("output.weight", (END,))):
        row = model.blocks(name)[tokens.index(CLOSING)].copy()
        if name == "output.weight":
            scale = row[:, :2].copy().view(np.float16) * np.float16(LARGER)  # each block begins with it
            row[:, :2] = scale.view(np.uint8)
        for token_id in changed:
            begin = model.tensors[name].offset + token_id * row.nbytes
            weights[begin : begin + row.nbytes] = row.tobytes()
    kinds = np.array(header.metadata["tokenizer.ggml.token_type"], np.int32)
    begin = head.index(kinds.tobytes())
    kinds[list(NAMES)] = USER_DEFINED
    head[begin : begin + kinds.nbytes] = kinds.tobytes()
    for token_id, name in NAMES.items():
        old = tokens[token_id].encode()
        head = head.replace(LENGTH.pack(len(old)) + old, LENGTH.pack(len(name)) + name, 1)
    Path(target).write_bytes(head + bytes(-len(head) % ALIGNMENT) + weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
