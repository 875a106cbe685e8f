"""Attention over the paged cache, and what writes to the cache."""
