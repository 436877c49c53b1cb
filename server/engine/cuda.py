"""Which driver, CUDA and cuDNN there are, as far as the libraries themselves say."""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The kernel module's own word; a container sees it too.
DRIVER_FILE = Path("/proc/driver/nvidia/version")
RUNTIMES = ("libcudart.so.13", "libcudart.so.12")
CUDNNS = ("libcudnn.so.9",)


@dataclass(frozen=True, slots=True)
class CudaVersions:
    """Each ``None`` where it cannot be known: ``driver`` as 570.86.15, ``cuda`` (the runtime's, else the newest that
    the driver takes) as 12.8, ``cudnn`` as 9.10.2."""

    driver: str | None
    cuda: str | None
    cudnn: str | None

    def __str__(self) -> str:
        named = {"driver": self.driver, "CUDA": self.cuda, "cuDNN": self.cudnn}
        return ", ".join(f"{name} {version or 'not found'}" for name, version in named.items())


def versions() -> CudaVersions:
    """What this process would load, or has loaded."""
    cuda = _asked(RUNTIMES, "cudaRuntimeGetVersion") or _asked(("libcuda.so.1",), "cuDriverGetVersion")
    return CudaVersions(_driver(), None if cuda is None else _cuda_name(cuda), _cudnn())


def _driver() -> str | None:
    try:
        text = DRIVER_FILE.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def _cudnn() -> str | None:
    library = _library(CUDNNS)
    if library is None:
        return None
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return _cudnn_name(library.cudnnGetVersion())


def _asked(names: Sequence[str], function: str) -> int | None:
    """The number that ``function`` of the first library found writes through its pointer."""
    library, number = _library(names), ctypes.c_int(0)
    if library is None or getattr(library, function)(ctypes.byref(number)) != 0:
        return None
    return number.value or None


def _library(names: Sequence[str]) -> Any:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _cuda_name(number: int) -> str:
    """12080 is 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _cudnn_name(number: int) -> str:
    """91002 is 9.10.2; before version 9 the major took one digit less."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
