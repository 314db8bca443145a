"""ChunkedTopK on a GPU: csrc/chunked_topk.cu."""

from __future__ import annotations

import numpy as np

from ....formats.entries import index_layout
from ...codec_types import ChunkedTopKLike
from ..block_codec import Blocks, Numbers


class ChunkedTopK(Blocks):
    """A block of threads takes a chunk at a time."""

    file, encoder, decoder = "chunked_topk.cu", "chunked_topk", "chunked_topk"

    def turns(self, codec: ChunkedTopKLike, numel: int) -> int:
        return -(-numel // self.block(codec))

    def encode_options(self, codec: ChunkedTopKLike) -> Numbers:
        layout = index_layout(codec.chunk, codec.k)
        form = codec.chunk, codec.k, codec.bits, layout.low_bits, layout.upper_words, layout.low_words
        return tuple(np.int32(number) for number in form)

    def decode_options(self, codec: ChunkedTopKLike) -> Numbers:
        return self.encode_options(codec)
