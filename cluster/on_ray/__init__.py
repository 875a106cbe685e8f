"""`baton serve --ray-address`: the roles and their supervisor are actors on a Ray cluster.

Raises ValueError where Ray is not installed.
"""

try:
    import ray
except ImportError as error:
    raise ValueError(
        "--ray-address: Ray is not installed; run `pip install -e '.[ray]'` in Baton's source directory"
    ) from error
