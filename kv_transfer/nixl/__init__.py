"""Reads memory of peers with NIXL: `--kv-connector nixl`."""
