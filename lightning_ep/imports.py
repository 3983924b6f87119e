"""The one place that knows which optional dependencies are installed."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec


def is_available(module: str) -> bool:
    """Whether `module` can be found, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version(distribution: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def version_of_module(module: str) -> str | None:
    """Installed version of the distribution that brought `module`, whatever that distribution is called."""
    names = metadata.packages_distributions().get(module, [])
    return version(names[0]) if names else None
