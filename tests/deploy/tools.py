"""Programs that are no Python packages."""

import os
import shutil

import pytest


def tool(name: str, whence: str) -> str:
    """Where the program ``name`` is. Skips where it is not installed (``whence`` says how), but fails in CI."""
    found = shutil.which(name)
    if found is None and not os.environ.get("CI"):
        pytest.skip(f"{name} is not installed ({whence})")
    assert found, f"{name} is missing: .ci/run installs it"
    return found
