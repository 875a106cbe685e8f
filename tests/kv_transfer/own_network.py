"""`unshare -rn python -m tests.kv_transfer.own_network ARGS`: pytest with a network of a loopback only."""

from __future__ import annotations

import sys

import pytest

from .link_down import link

if __name__ == "__main__":
    link("up")
    sys.exit(pytest.main(sys.argv[1:]))
