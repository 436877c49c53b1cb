"""What the server's tests have too."""

from tests.server.conftest import anyio_backend, no_settings_from_outside

__all__ = ["anyio_backend", "no_settings_from_outside"]
