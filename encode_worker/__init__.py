"""The encode role: an engine process that encodes images, and no language model.

1. A router sends the pixels of an image. `process` gives them to the encoder (`baton.vision`).
2. The embeddings stay, by name, and `serving` sends them to the workers that ask for them.

By default prefill workers have an encoder inside their engine, and no worker of this role is there.
"""
