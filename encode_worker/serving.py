"""The end of an encoder that sends embeddings of images to the workers that ask for them."""

from collections import OrderedDict, deque

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer import ContentWanted, Transport
from baton.vision.embeddings import EmbeddingFormat
from baton.vision.encoder import Encoder
from baton.worker.engine_process.embeddings import PagedEmbeddings, chunk_names

MOST_NAMES = 1 << 16
"""Images that can be asked for. What is kept of them is bounded in bytes."""


class ServedEmbeddings:
    """Sends what `images` keeps. The loop's thread makes all calls.

    A fetch waits for memory until those before it have ended, which have deadlines; so has the fetch itself.

    Attributes:
        fetched: images that were sent, or are being sent.
    """

    def __init__(self, transport: Transport, made: EmbeddingFormat, images: Encoder) -> None:
        self.fetched = 0
        self._images = images
        self._memory = PagedEmbeddings(made)
        self.blocks = len(self._memory.free)
        self._transport = transport  # the other end, which receives nothing, must stay open
        self._sender = transport.sender(self._memory.paged)
        self._by_chunk = OrderedDict[bytes, tuple[bytes, int]]()
        self._waiting = deque[ContentWanted]()

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._sender.fileno()

    @property
    def blocks_free(self) -> int:
        return len(self._memory.free)

    @property
    def idle(self) -> bool:
        return not self._waiting and self.blocks_free == self.blocks and self._sender.idle

    def encoded(self, name: bytes, tokens: int) -> None:
        """Workers may ask for this image from now on."""
        [first] = chunk_names(name, 1)
        self._by_chunk[first] = name, tokens
        self._by_chunk.move_to_end(first)
        if len(self._by_chunk) > MOST_NAMES:
            self._by_chunk.popitem(last=False)

    def poll(self) -> None:
        for event in self._sender.poll():
            if isinstance(event, ContentWanted):
                self._waiting.append(event)
            else:
                name, blocks = event.owner
                self._memory.free += blocks
                if event.reason == "acked":
                    self._images.release(name)
        while self._waiting and self._serve(self._waiting[0]):
            self._waiting.popleft()

    def _serve(self, wanted: ContentWanted) -> bool:
        """False: there is no memory now."""
        name, tokens = self._by_chunk.get(wanted.chunks[0], (b"", 0))
        embeddings = self._images.kept(name) if name and wanted.first_chunk == 0 else None
        if embeddings is None or list(wanted.chunks) != chunk_names(name, tokens):
            self._sender.close(wanted.pin_id, "gone")
            return True
        if (blocks := self._memory.take(tokens)) is None:
            return False
        self._memory.write(blocks, embeddings)
        self._sender.serve(wanted.pin_id, blocks, 0, len(blocks) * CHUNK_TOKENS, owner=(name, blocks))
        self.fetched += 1
        return True

    def close(self) -> None:
        self._sender.shutdown()
