"""Stand-ins for Baton's neighbours on real sockets: a worker and the API server of Kubernetes.

Tests and benches use the same stand-ins. They live here, since tests may import benches, and benches must run
without the tests.
"""
