"""The identity of a tokenizer, by which routers and workers see whether they mean the same text by an id."""

import hashlib
import json
from collections.abc import Mapping


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Of the ids of all tokens by their text, added tokens included. Empty for an empty vocabulary.

    It does not depend on the file format: a GGUF file and a Hugging Face directory of one model agree.
    """
    if not vocabulary:
        return ""
    by_id = sorted((token_id, token) for token, token_id in vocabulary.items())
    return hashlib.sha256(json.dumps(by_id).encode()).hexdigest()[:32]
