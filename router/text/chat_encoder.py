"""Tokenizes the text of chats, and keeps the tokens: each turn of a chat repeats all turns before it.

A tokenizer first cuts a text at its special tokens, and then looks at each piece alone. So a *part*, from one
special token up to the next, has the same tokens in every text. What comes before the first special token may
not: some tokenizers put a space at the beginning of a text.
"""

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import pairwise

from tokenizers import Tokenizer

MOST_BYTES = 32 << 20
"""Of the parts that are kept, with their tokens."""
ENTRY_BYTES = 512
"""What an entry takes beside its text and its tokens, about."""


class ChatEncoder:
    """Gives the tokens that the tokenizer gives without `add_special_tokens`. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, most_bytes: int = MOST_BYTES) -> None:
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[Hashable, str], array[int]] = OrderedDict()  # least recently used first
        added = tokenizer.get_added_tokens_decoder()
        # The tokenizer finds these before it changes the text. Where several match, it takes the longest.
        raw = {token_id: token for token_id, token in added.items() if not token.normalized}
        longest_first = sorted((token.content for token in raw.values()), key=len, reverse=True)
        self._raw = re.compile("|".join(map(re.escape, longest_first)))
        # With `lstrip`, a token also takes the spaces before it, which would be in another part.
        self._heads = {i for i, t in raw.items() if t.special and not t.lstrip and not t.content[0].isspace()}
        changes = tokenizer.truncation or tokenizer.padding or tokenizer.encode_special_tokens
        if changes or any(token.single_word for token in raw.values()):
            self._heads = set()
        self._names = {raw[token_id].content for token_id in self._heads}

    def encode(self, text: str, scope: Hashable) -> list[int]:
        """`scope`: only texts of the same scope share parts."""
        if not self._heads:
            return self._encode(text)
        starts = [match.start() for match in self._raw.finditer(text) if match.group() in self._names]
        ids = array("I", self._encode(text[: starts[0]]) if starts else self._encode(text))
        known = 0  # parts whose tokens are in `ids`
        for part, (start, stop) in enumerate(pairwise([*starts, len(text)])):
            tokens = self._kept.get((scope, text[start:stop]))
            if tokens is not None:
                self._kept.move_to_end((scope, text[start:stop]))
                ids.extend(self._new(text, starts[known:part], start, scope))
                ids.extend(tokens)
                known = part + 1
        ids.extend(self._new(text, starts[known:], len(text), scope))
        return ids.tolist()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _new(self, text: str, starts: Sequence[int], stop: int, scope: Hashable) -> "array[int]":
        """Tokenizes and keeps the parts that begin at `starts`. The last one ends at `stop`."""
        if not starts:
            return array("I")
        ids = array("I", self._encode(text[starts[0] : stop]))
        heads = [place for place, token_id in enumerate(ids) if token_id in self._heads]
        if len(heads) == len(starts):  # no part has an unknown token, which may be one of them, too
            spans = zip(pairwise([*starts, stop]), pairwise([*heads, len(ids)]), strict=True)
            for (start, end), (first, last) in spans:
                self._keep((scope, text[start:end]), ids[first:last])
        return ids

    def _keep(self, key: tuple[Hashable, str], tokens: "array[int]") -> None:
        if key not in self._kept:
            self._kept[key] = tokens
            self._bytes += _size(key[1], tokens)
        while self._bytes > self._most_bytes:
            (_, text), tokens = self._kept.popitem(last=False)
            self._bytes -= _size(text, tokens)


def _size(text: str, tokens: "array[int]") -> int:
    return sys.getsizeof(text) + sys.getsizeof(tokens) + ENTRY_BYTES
