"""A stand-in for a worker, on real sockets.

Tests and benches use it. It lives here, because tests may import benches, and benches must run without the
tests.
"""
