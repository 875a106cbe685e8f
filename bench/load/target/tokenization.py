"""Prompts with exact lengths in the tokens of the server.

A prompt is a sequence of segments. A segment is (seed, length). In a run the same segment is always the same
text. So prompts can share prefixes or the blocks of a trace. Text is made of common words that are one token
each for the server, so that lengths add up (`endpoint.find_tokenization` checks this with `/tokenize`).
Prompts of token ids are made in the same way: their words are the ids of these tokens, as numbers of a list.
"""

from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import xxhash

# Short and common, hence one token each (with the space before) in the usual vocabularies.
_COMMON = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had "
    "by hot but some what there we can out other were all your when up use how said each she which do "
    "their time if will way about many then them would write like so these her long make thing see him "
    "two has look more day could go come did my no most number who over know than call first people may "
    "down side been now find any new work part take get place made where after back little only round "
    "man year came show every good me give our under name very through just form much great think say "
    "help low line before turn cause same mean move right boy old too does tell set three want air well "
    "also play small end put home read hand port large add even land here must big high such follow act "
    "why ask men change went light kind off need house point try us again near build self earth father "
    "head stand own page should found answer school"
)
WORDS = tuple(_COMMON.split())
_LONG = 1 << 18  # words: the longest segment
_HEAD = 6


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """`length` tokens drawn from `seed`."""

    seed: tuple[int, ...]
    length: int


class Tokenization(msgspec.Struct, frozen=True):
    """How lengths in tokens become prompts.

    Attributes:
        overhead: tokens that the server adds to every prompt (BOS, the chat template).
        statement: whether the lengths are exact, for the report.
        ids: the token id of each word, if the server told them.
        separator: stands between two words.
    """

    words: tuple[str, ...]
    tokens_per_word: float
    overhead: int
    statement: str
    ids: tuple[int, ...] = ()
    separator: str = " "

    def of_ids(self) -> Self:
        """For prompts of token ids, to which the server adds nothing."""
        assert self.ids, "the server told no ids"
        return type(self)(tuple(map(str, self.ids)), 1.0, 0, "exact, by token ids", separator=",")


class Composer:
    """Makes prompts. A segment is a slice of one long random text, so that a prompt takes little time.

    The long text is the same in every process. Each segment begins with a few words from its own seed. So two
    prompts with overlapping slices still differ from their first token.
    """

    def __init__(self, tokenization: Tokenization, texts: int = 0) -> None:
        """`texts`: with another number the same segments have other texts."""
        self._tokenization = tokenization
        self._texts = texts
        choices = np.random.default_rng(0).integers(0, len(tokenization.words), 2 * _LONG)
        words = [tokenization.words[i] for i in choices.tolist()]
        self._text = tokenization.separator.join(words)
        # Where word i starts. The last entry is one past the end, as if a word followed.
        lengths = np.array([len(word) + 1 for word in tokenization.words])
        self._starts = np.concatenate(([0], np.cumsum(lengths[choices])))

    def compose(self, segments: Sequence[Segment], *, first: bool = True) -> str:
        """The prompt that the server counts as the sum of the segments' lengths.

        Only the `first` turn of a session has the server's overhead. The end of the prompt gets shorter by
        it, so that a shared prefix stays shared.
        """
        lengths = [s.length for s in segments]
        excess = self._tokenization.overhead if first else 0
        assert excess < sum(lengths), (
            f"a prompt of {sum(lengths)} tokens has no room beside the server's overhead"
        )
        for i in reversed(range(len(lengths))):
            cut = min(excess, lengths[i])
            lengths[i] -= cut
            excess -= cut
        per_word = self._tokenization.tokens_per_word
        texts = (
            self._slice(segment, round(length / per_word))
            for segment, length in zip(segments, lengths, strict=True)
        )
        return self._tokenization.separator.join(text for text in texts if text)

    def _slice(self, segment: Segment, count: int) -> str:
        assert count <= _LONG, f"a segment of {count} words is longer than {_LONG}"
        number = xxhash.xxh3_128_intdigest(repr((self._texts, *segment.seed)).encode())
        number, start = divmod(number, _LONG)
        head: list[str] = []
        for _ in range(min(_HEAD, count)):
            number, i = divmod(number, len(self._tokenization.words))
            head.append(self._tokenization.words[i])
        text = self._text[self._starts[start] : self._starts[start + count - len(head)] - 1]
        return self._tokenization.separator.join([*head, text] if text else head)
