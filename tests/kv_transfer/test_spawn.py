"""What a transfer process is started with."""

from __future__ import annotations

from typing import Any

import pytest

from .transfer_process import TransferProcess


def test_the_cluster_secret_is_not_in_its_environment(
    make_prefill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's new title clears /proc/PID/environ, but others could have read that before."""
    environments: list[dict[str, str]] = []
    popen = TransferProcess.popen

    def recorded(*args: Any, env: dict[str, str] | None = None, **kwargs: Any) -> Any:
        assert env is not None, "it inherits everything"
        environments.append(env)
        return popen(*args, env=env, **kwargs)

    monkeypatch.setenv("BATON_CLUSTER_SECRET", "a cluster secret for tests")
    monkeypatch.setattr(TransferProcess, "popen", staticmethod(recorded))
    make_prefill()
    assert ["BATON_CLUSTER_SECRET" in environment for environment in environments] == [False]
