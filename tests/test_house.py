"""The rules of the house that no other tool checks."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# The names of docs and design; another top-level name needs a decision record first.
FOLDERS = {".ci", "benchmarks", "deploy", "docs", "models", "server", "tests", "training"}
FILES = {
    ".dockerignore",
    ".gitattributes",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Dockerfile",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "docker-compose.yml",
    "offramp.py",
    "pyproject.toml",
}

ONLY_TRAINING_NEEDS = {
    "accelerate",
    "matplotlib",
    "onnx",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboard",
    "torch",
    "transformers",
}

# Written in pieces, so that this file does not hold what it looks for.
NOT_IN_FILES = {
    "a path of one machine": re.compile("|".join(["/wor" + "k/", "/roo" + "t/", "/op" + "t/", r"/hom" + r"e/\w"])),
    "the host of a package registry": re.compile(
        "|".join(["pypi" + r"\.org", "files.python" + "hosted", "index" + "-url"])
    ),
}


def committed_files() -> list[Path]:
    """Every file that git tracks; the tests also run where there is no git, and then there is nothing to say."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [Path(name) for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def modules_of(package: str) -> list[str]:
    """Dotted names of all modules of a top-level package, from its files."""
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level names in ``sys.modules`` of a fresh interpreter that has imported ``modules``."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def requirements() -> dict[str, list[Requirement]]:
    """Requirements by extra; the base ones under the empty name."""
    project = PYPROJECT["project"]
    by_extra = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(text) for text in texts] for extra, texts in by_extra.items()}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_top_level_names_are_those_of_the_design() -> None:
    folders = {file.parts[0] for file in committed_files() if len(file.parts) > 1}
    files = {file.name for file in committed_files() if len(file.parts) == 1}
    assert folders <= FOLDERS
    assert files <= FILES


@pytest.mark.parametrize("what", NOT_IN_FILES)
def test_no_committed_file_holds(what: str) -> None:
    found = []
    for file in committed_files():
        try:
            text = (ROOT / file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{file}: {match.group()}" for match in NOT_IN_FILES[what].finditer(text)]
    assert not found


def test_importing_all_of_the_server_loads_nothing_that_only_training_needs() -> None:
    assert not loaded_by(modules_of("server")) & ONLY_TRAINING_NEEDS


def test_importing_models_loads_torch_only_for_the_network() -> None:
    modules = [name for name in modules_of("models") if name != "models.network"]
    assert "models.bundle" in modules
    assert not loaded_by(modules) & ONLY_TRAINING_NEEDS


def test_importing_the_command_line_loads_no_side() -> None:
    heavy = ONLY_TRAINING_NEEDS | {"onnxruntime", "tokenizers", "fastapi", "numpy"}
    assert not loaded_by(["offramp"]) & heavy


@pytest.mark.parametrize("package", ["models", "server", "training"])
def test_every_folder_with_modules_is_a_package_so_that_it_is_installed(package: str) -> None:
    folders = {file.parent for file in (ROOT / package).rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


def test_serving_requires_nothing_that_only_training_needs() -> None:
    needed = {canonicalize_name(requirement.name) for requirement in requirements()[""]}
    assert not needed & ONLY_TRAINING_NEEDS


def test_every_requirement_is_pinned_within_its_range() -> None:
    pinned = pins()
    wrong = [
        str(requirement)
        for group in requirements().values()
        for requirement in group
        if not requirement.specifier.contains(pinned.get(canonicalize_name(requirement.name), "0"))
    ]
    assert not wrong


def test_every_requirement_has_a_lower_bound() -> None:
    bare = [
        str(requirement)
        for group in requirements().values()
        for requirement in group
        if not any(specifier.operator in (">=", "==", "~=") for specifier in requirement.specifier)
    ]
    assert not bare


def test_pins_are_exact_and_fit_any_machine() -> None:
    assert len(pins()) > 50
    assert not [f"{name}=={version}" for name, version in pins().items() if "+" in version or "*" in version]


def test_one_onnxruntime_for_each_of_cpu_and_gpu_and_none_by_default() -> None:
    names = {extra: {requirement.name for requirement in group} for extra, group in requirements().items()}
    assert names["cpu"] == {"onnxruntime"}
    assert names["gpu"] == {"onnxruntime-gpu"}
    others = set().union(*(names[extra] for extra in names if extra not in ("cpu", "gpu")))
    assert not others & {"onnxruntime", "onnxruntime-gpu"}
