"""Keys: who may ask. Everything but the public routes needs one, where the server has any."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ApiError
from server.api.page import PREFIX
from server.config import Settings, StartError, check_key

PUBLIC = frozenset({"/livez", "/readyz", "/metrics"})
"""Routes for machines that have no key: probes and scrapers. They tell nothing of any text."""


def load_keys(settings: Settings) -> tuple[bytes, ...]:
    """SHA-256 digests of all keys of ``settings``. Raises :class:`StartError`, which never says a key."""
    keys = [key.get_secret_value() for key in settings.api_key]
    path = settings.api_key_file
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
        for number, line in enumerate(lines, start=1):
            key = line.strip()
            if not key or key.startswith("#"):
                continue
            try:
                check_key(key)
            except ValueError as error:
                raise StartError(f"{path}, line {number}: {error}") from None
            keys.append(key)
        if not keys:
            # Whoever names a file wants the server locked: an empty one must not open it.
            raise StartError(f"{path}: no key in it")
    return tuple(_digest(key.encode("ascii")) for key in keys)


class RequireKey:
    """Answers 401 to whoever has no key, except on the public routes."""

    def __init__(self, app: ASGIApp, digests: Sequence[bytes]) -> None:
        self._app = app
        self._digests = tuple(digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_public(scope) or self._knows(_given(scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "a key is needed: Authorization: Bearer <key>", headers={"WWW-Authenticate": "Bearer"})
        await error.response(scope)(scope, receive, send)

    def _knows(self, key: bytes) -> bool:
        """Whether ``key`` is one of ours; how long that takes tells neither which one nor how much of it was right."""
        given = _digest(key)
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(given, digest)
        return known


def _is_public(scope: Scope) -> bool:
    """Whether no key is needed: for the routes above, and for the page, which asks its reader for one. Its files are
    the same on every server; ``POST /`` is a door."""
    path = scope["path"]
    is_page = scope["method"] in ("GET", "HEAD") and (path == "/" or path.startswith(PREFIX))
    return path in PUBLIC or is_page


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _given(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
    return b""
