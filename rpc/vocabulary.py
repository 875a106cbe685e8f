"""The fingerprint of a tokenizer.

Routers and workers compare it: equal means that ids stand for equal text.
"""

import hashlib
import json
from collections.abc import Mapping


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Returns the fingerprint of a map from token text to token id, added tokens included.

    The result is "" for an empty vocabulary. It does not depend on the file format: a GGUF file and a Hugging
    Face directory of one model have the same fingerprint.
    """
    if not vocabulary:
        return ""
    by_id = sorted((token_id, token) for token, token_id in vocabulary.items())
    return hashlib.sha256(json.dumps(by_id).encode()).hexdigest()[:32]
