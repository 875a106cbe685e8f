"""The server under test: what it is and accepts, one request to it, and what is kept of its answer."""
