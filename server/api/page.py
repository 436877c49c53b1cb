"""The page at ``/``: the files of ``server/playground``, with headers that let a browser run these files and no others.

It asks the same routes as any client does, and holds nothing of its own: not even the models' names, which need a key
where the server has keys.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

from server.api.errors import ApiError

FOLDER = Path(__file__).resolve().parents[1] / "playground"
PREFIX = "/playground/"

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_HEADERS = {
    # No inline script or style, no other host, and no markup made from strings (trusted-types).
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    # Kept, and asked about each time: after an upgrade no file of the version before is left.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is served."""

    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """The file, or 304 where the browser has it already."""
        headers = {**_HEADERS, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def load_assets(folder: Path = FOLDER) -> Mapping[str, Asset]:
    """The files of ``folder`` by name; they stay in memory, about 100 kB in all."""
    assets = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        assets[path.name] = Asset(content, _TYPES[path.suffix], etag)
    return assets


def add_routes(router: APIRouter) -> None:
    assets = load_assets()

    @router.get("/", include_in_schema=False)
    async def get_page(request: Request) -> Response:
        return assets["index.html"].response(request)

    @router.get(PREFIX + "{name}", include_in_schema=False)
    async def get_asset(request: Request) -> Response:
        asset = assets.get(request.path_params["name"])
        if asset is None:
            raise ApiError(404, "no such route")
        return asset.response(request)
