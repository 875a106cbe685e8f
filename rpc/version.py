"""The version of Baton."""

import importlib.metadata


def version() -> str:
    try:
        return importlib.metadata.version("baton-llm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # runs from a checkout, without installation
