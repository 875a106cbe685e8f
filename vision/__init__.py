"""Encodes images: from pixels to the embeddings that a language model takes in place of tokens.

1. A router decodes an image and resizes it by the settings of its model (`images`). Workers get the pixels
   of red, green and blue.
2. `Tower` runs the vision tower of transformers on them. It has the weights of the vision tower only. On a
   GPU, embeddings lie in memory that the GPU reads without the host (`PinnedMemory`), taken at the start,
   and CUDA graphs may replay the tower for sizes of images that come again (`TowerGraphs`).
3. `Encoder` has one thread for the tower, and keeps embeddings by the name of their image, up to a limit of
   bytes. The same image, in whichever request, is encoded once while it is kept. Keys take turns.
4. `Turns` divides the device between the layers of the tower and the steps of the engine, where requests
   decode: a step and the layers beside it fit the target of a gap.

By default prefill workers have an encoder inside their engine. It computes while the engine computes steps,
and a prompt starts with the text before its first image. Or encoders are workers of their own
(`encode_worker/process.py`): a router sends them the pixels, and workers fetch the embeddings by name
(`worker/engine_process/embeddings.py`). `Embeddings` is what both have in common.

transformers is imported when a model that sees images is loaded: the extra `images` installs it.
"""
