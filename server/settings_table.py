"""Every setting in one table, for docs/operations.md: ``python -m server.settings_table``."""

import sys
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from server.config import Settings


def settings_table() -> str:
    """A Markdown table of all settings: flag, environment variable, kind of value, default, meaning."""
    lines = ["| flag | variable | value | default | meaning |", "|---|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        flag = "`BUNDLE ...`" if name == "bundles" else f"`--{name.replace('_', '-')}`"
        meaning = (field.description or "").replace("|", "\\|").replace("<", "&lt;")
        lines.append(
            f"| {flag} | `OFFRAMP_{name.upper()}` | {_kind(field.annotation)} | {_default(field)} | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin is tuple:
        return f"{_kind(get_args(annotation)[0])}, several"
    if origin in (types.UnionType, Union):
        return _kind(next(part for part in get_args(annotation) if part is not types.NoneType))
    names = {"int": "whole number", "float": "number", "bool": "true or false", "Path": "path", "SecretStr": "text"}
    return names.get(annotation.__name__, "text")


def _default(field: FieldInfo) -> str:
    if field.default is None or field.default == ():
        return "–"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


if __name__ == "__main__":
    sys.stdout.write(settings_table())
