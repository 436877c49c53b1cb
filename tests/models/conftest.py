"""Property tests: the same examples for everybody, and no clock (a loaded machine must not fail a test)."""

from hypothesis import settings

settings.register_profile("offramp", deadline=None, derandomize=True)
settings.load_profile("offramp")
