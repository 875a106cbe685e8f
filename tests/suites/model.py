"""Gives a GGUF file of Qwen 2.5 the two tokens of reasoning: `python -m tests.suites.model FROM TO`.

Qwen 2.5 has unused tokens at the ids that <think> and </think> have in Qwen 3. They get those names. A model
that is asked to write </think> writes "</" first: the row of that token, enlarged, makes it </think>.
"""

import sys
from pathlib import Path

import numpy as np

from baton.content.gguf import LENGTH, USER_DEFINED, GGUFHeader
from baton.engine.loader.gguf_file import GGUFFile

NAMES = {151667: "<think>", 151668: "</think>"}
CLOSING = "</"
LARGER = 1.15


def main(source: str, target: str) -> None:
    header = GGUFHeader(Path(source), vocabulary=True)
    model = GGUFFile(Path(source))
    tokens = header.metadata["tokenizer.ggml.tokens"]
    raw = bytearray(header.data)
    for name in ("token_embd.weight", "output.weight"):
        info = model.tensors[name]
        size = info.num_bytes // info.shape[0]
        begin = model._data_start + info.offset
        at = begin + tokens.index(CLOSING) * size
        blocks = np.frombuffer(raw[at : at + size], np.uint8).reshape(*model.blocks(name).shape[1:]).copy()
        if name == "output.weight":
            scales = blocks[:, :2].view(np.float16)
            scales *= np.float16(LARGER)
        for token_id in NAMES:
            if token_id == 151668 or name == "token_embd.weight":
                raw[begin + token_id * size : begin + (token_id + 1) * size] = blocks.tobytes()
    kinds = np.array(header.metadata["tokenizer.ggml.token_type"], np.int32)
    at = raw.index(kinds.tobytes(), 0, model._data_start)
    for token_id in NAMES:
        kinds[token_id] = USER_DEFINED
    raw[at : at + kinds.nbytes] = kinds.tobytes()
    head, data = bytes(raw[: header.end]), raw[model._data_start :]
    for token_id, name in NAMES.items():
        old = tokens[token_id].encode()
        head = head.replace(LENGTH.pack(len(old)) + old, LENGTH.pack(len(name)) + name.encode(), 1)
    head += bytes(-len(head) % 32)
    Path(target).write_bytes(head + data)


if __name__ == "__main__":
    main(*sys.argv[1:])
