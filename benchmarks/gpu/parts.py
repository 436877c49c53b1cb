"""Carries a folder to a machine that nothing can be downloaded to, in parts of a bounded size.

    python benchmarks/gpu/parts.py split FOLDER PARTS [--megabytes 60]   # FOLDER as .tar.xz, cut into PARTS/part-...
    python benchmarks/gpu/parts.py join PARTS FOLDER                     # and back, once every part is checked

Needs nothing but Python. ``PARTS/sums.json`` holds each part's sha256, so one that is missing or cut short is named.
"""

import argparse
import hashlib
import io
import json
import lzma
import sys
import tarfile
from pathlib import Path

SUMS = "sums.json"


def split(folder: Path, parts: Path, part_bytes: int) -> list[Path]:
    """Packs ``folder`` and writes it as files of at most ``part_bytes`` bytes; returns them in order."""
    parts.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    # Preset 6: a CUDA provider of 284 MB packs to two thirds; higher presets need minutes more for little.
    with tarfile.open(fileobj=packed, mode="w:xz", preset=6) as archive:
        archive.add(folder, arcname=".")
    data = packed.getbuffer()
    written, sums = [], {}
    for number, start in enumerate(range(0, len(data), part_bytes)):
        path = parts / f"part-{number:03}"
        path.write_bytes(data[start : start + part_bytes])
        sums[path.name] = hashlib.sha256(data[start : start + part_bytes]).hexdigest()
        written.append(path)
    (parts / SUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
    return written


def join(parts: Path, folder: Path) -> None:
    """Unpacks what :func:`split` wrote. Raises ``ValueError``, naming the part, where one is missing or altered."""
    try:
        sums = json.loads((parts / SUMS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{parts / SUMS}: missing") from None
    packed = io.BytesIO()
    for name, digest in sums.items():
        path = parts / name
        if not path.is_file():
            raise ValueError(f"{path}: missing")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{path}: not as it was written ({len(content)} bytes)")
        packed.write(content)
    packed.seek(0)
    folder.mkdir(parents=True, exist_ok=True)
    with lzma.open(packed) as stream, tarfile.open(fileobj=stream) as archive:
        archive.extractall(folder, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, first, second in (("split", "folder", "parts"), ("join", "parts", "folder")):
        command = commands.add_parser(name)
        command.add_argument(first, type=Path)
        command.add_argument(second, type=Path)
    commands.choices["split"].add_argument("--megabytes", type=int, default=60, help="most of one part")
    options = parser.parse_args()
    if options.command == "split":
        for path in split(options.folder, options.parts, options.megabytes * 1_000_000):
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
        return
    try:
        join(options.parts, options.folder)
    except ValueError as error:
        sys.exit(f"parts: {error}")


if __name__ == "__main__":
    main()
