"""The names of what a request begins with: of its full blocks and chunks. Pure."""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from baton.engine.api.request import CachedBlock
from baton.kv_names import CHUNK_TOKENS, ImageSpan, extend_names, names_of_prefixes, packed, salted


class PrefixNames:
    """Names of the beginning of a request. They grow with the request, and no token is hashed again.

    Attributes:
        blocks: of each full block, the name of all tokens up to its end.
        chunks: of each full chunk (`kv_names`).
        salt, tenant: of the request.
    """

    def __init__(
        self,
        root: bytes,
        salt: bytes,
        block_size: int,
        tenant: bytes = b"",
        images: Sequence[ImageSpan] = (),
    ) -> None:
        self.salt = salt
        self.tenant = tenant
        self.blocks: list[bytes] = []
        self.chunks: list[bytes] = []
        self._root = salted(root, salt)
        self._block_size = block_size
        self._images = images
        self._token_ids = array("i")  # of `blocks` at least

    def extend(self, token_ids: Sequence[int], count: int) -> None:
        """Names all full blocks and chunks within the first `count` tokens."""
        if count < (len(self.blocks) + 1) * self._block_size:
            return
        tokens = self._token_ids
        tokens.extend(packed(token_ids[len(tokens) : count]))
        extend_names(self.chunks, tokens, count, self._root, self._images)
        size = self._block_size
        ends = range((len(self.blocks) + 1) * size, count + 1, size)
        self.blocks += names_of_prefixes(self.chunks, tokens, ends, self._root, self._images)

    def of_chunk(self, token_ids: Sequence[int], end: int) -> bytes:
        """The name of the first `end` tokens, which are full chunks."""
        self._token_ids.extend(packed(token_ids[len(self._token_ids) : end]))
        extend_names(self.chunks, self._token_ids, end, self._root, self._images)
        return self.chunks[end // CHUNK_TOKENS - 1]

    def cached(self, indices: Iterable[int]) -> Iterator[CachedBlock]:
        """These blocks, with the chunks that end in them."""
        size, blocks, tokens = self._block_size, self.blocks, self._token_ids
        for index in indices:
            begin, end = index * size, (index + 1) * size
            start = begin // CHUNK_TOKENS
            chunks, before = self.chunks[start : end // CHUNK_TOKENS], blocks[index - 1] if index else b""
            yield CachedBlock(blocks[index], chunks, start, self.salt, before, tokens[begin:end], self.tenant)
