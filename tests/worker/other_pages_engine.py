"""The engine process of a worker whose later engine processes keep KV in pages of another size than the first
one, as of a new version of Baton.

It runs by `python -m tests.worker.other_pages_engine`.
"""

from baton.cluster import engine_process
from baton.system.kept_pages import close
from baton.worker.engine_process.start import EngineProcessConfig, start
from tests.worker.held_engine import hold_requests


def run(config: EngineProcessConfig) -> int:
    from baton.engine.execution import kept_cache

    close(*(kept := config.kept_files[0].cache.pages()))
    if kept:
        kept_cache.MOST_PAGES = 32  # pyrefly: ignore[bad-assignment]
    return engine_process.run(config)


if __name__ == "__main__":
    hold_requests()
    start(EngineProcessConfig, run)
