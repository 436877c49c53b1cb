"""Versions, from what the libraries say; none of them is here."""

import ctypes
from pathlib import Path
from typing import Any

import pytest

from server.engine import cuda
from server.engine.cuda import CudaVersions, versions

REPORT = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 03:50:41 UTC 2025\nGCC version: 12.2\n"
OPEN_REPORT = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root)  Sun Jul 27\n"


class Library:
    """As much of libcudart and libcudnn as is asked."""

    def cudaRuntimeGetVersion(self, number: Any) -> int:
        number._obj.value = 12080
        return 0

    @property
    def cudnnGetVersion(self) -> Any:
        def version() -> int:
            return 91002

        return version


def test_nothing_is_known_where_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda, "DRIVER_FILE", tmp_path / "none")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert versions() == CudaVersions(None, None, None)
    assert str(versions()) == "driver not found, CUDA not found, cuDNN not found"


@pytest.mark.parametrize(("report", "driver"), [(REPORT, "570.86.15"), (OPEN_REPORT, "580.65.06"), ("else", None)])
def test_versions_are_written_as_people_do(
    report: str, driver: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    file.write_text(report)
    monkeypatch.setattr(cuda, "DRIVER_FILE", file)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert versions() == CudaVersions(driver, "12.8", "9.10.2")


def test_a_driver_that_answers_with_an_error_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "DRIVER_FILE", tmp_path / "none")
    monkeypatch.setattr(Library, "cudaRuntimeGetVersion", lambda self, number: 35)
    monkeypatch.setattr(Library, "cuDriverGetVersion", lambda self, number: 100, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert versions().cuda is None
