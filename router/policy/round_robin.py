"""Prefill: each worker in turn. For comparison, and for equal prompts without prefix caches."""

from baton.router.policy.prefill import PrefillRequest, PrefillSnapshot


def round_robin(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    return int(snapshot.rows[request.arrival % len(snapshot.rows)])
