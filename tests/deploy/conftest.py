"""What the server's tests have too."""

from tests.server.conftest import anyio_backend as anyio_backend
from tests.server.conftest import no_settings_from_outside as no_settings_from_outside
