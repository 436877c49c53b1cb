"""Log lines on standard error, for people or as JSON. Nothing that logs here is ever given a text."""

import json
import logging
import socket
import sys
from datetime import UTC, datetime
from typing import Literal

FIELDS = "offramp_fields"
"""The attribute of a log record that carries a JSON line's further fields (``extra={FIELDS: {...}}``)."""


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, further fields, ``exception``; of
    several server processes also ``worker``, the number of the one that says it."""

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._process = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: str, style: Literal["text", "json"], worker: int | None = None) -> None:
    """Sends log lines of ``level`` and above to standard error, with the number of the ``worker`` that this process is
    of several."""
    handler = logging.StreamHandler(sys.stderr)
    who = "" if worker is None else f"[{worker}]"
    text = logging.Formatter(f"%(asctime)s %(levelname)s %(name)s{who}: %(message)s")
    handler.setFormatter(JsonLines(worker) if style == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def log_addresses(listening: socket.socket, monitor: socket.socket | None, processes: int = 1) -> None:
    """Says where the server is."""
    logger = logging.getLogger("offramp")
    if monitor is not None:
        logger.info("metrics on %s/metrics", _url(monitor))
    # Last: whoever starts a server waits for this line.
    logger.info("listening on %s%s", _url(listening), f" with {processes} processes" if processes > 1 else "")


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
