"""Fetching, checking and converting data files, against a real HTTP server that drops connections when told to."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent_system.environments.env_package.webshop import generator
from agent_system.environments.env_package.webshop.json_stream import DataFileError
from agent_system.environments.env_package.webshop.official_files import (
    DownloadError,
    _only_fetcher,
    check_folder,
    download,
    file_sha256,
)
from agent_system.environments.env_package.webshop.session import load_shop

SCRIPT = Path(__file__).parents[2] / "examples" / "data_preprocess" / "webshop_data.py"


class FileServer:
    """Serves one folder. ``drop_after`` bytes a connection is cut, ``drops`` times; ``requests`` records ranges."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drop_after: int | None = None
        self.drops = 0
        self.etag = '"one"'
        self.status = 200
        self.html = False
        self.requests: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *arguments: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append((handler.path, handler.headers.get("Range")))
        path = self.folder / handler.path.strip("/")
        if self.status != 200 or not path.is_file():
            handler.send_error(404 if self.status == 200 else self.status)
            return
        body = path.read_bytes()
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
        if asked and handler.headers.get("If-Range") == self.etag:
            start = int(asked.group(1))
            if start >= len(body):
                handler.send_error(416)
                return
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(body) - start))
        handler.send_header("ETag", self.etag)
        handler.send_header("Content-Type", "text/html" if self.html else "application/json")
        handler.end_headers()
        end = len(body)
        if self.drop_after is not None and self.drops > 0:
            self.drops -= 1
            end = min(start + self.drop_after, end)
        handler.wfile.write(body[start:end])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(timeout=5)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[FileServer]:
    folder = tmp_path / "served"
    generator.write_dataset(folder, 150, 3)
    server = FileServer(folder)
    yield server
    server.close()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("webshop_data", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_dropped_connection_goes_on_where_it_stopped(served: FileServer, tmp_path: Path) -> None:
    name = generator.SMALL_FILES[0]
    size = (served.folder / name).stat().st_size
    served.drop_after, served.drops = size // 3, 2
    target = download(served.url + name, tmp_path / name, file_sha256(served.folder / name), pause_s=0.01)
    assert target.read_bytes() == (served.folder / name).read_bytes()
    assert [asked for _, asked in served.requests] == [None, f"bytes={size // 3}-", f"bytes={size // 3 * 2}-"]
    assert not list(tmp_path.glob("*.part*"))


def test_the_next_call_goes_on_after_a_failed_one(served: FileServer, tmp_path: Path) -> None:
    name = generator.SMALL_FILES[0]
    served.drop_after, served.drops = 10_000, 5
    with pytest.raises(DownloadError, match="20,000 bytes .* run the same command again"):
        download(served.url + name, tmp_path / name, attempts=2, pause_s=0.01)
    assert not (tmp_path / name).exists()
    served.drops = 0
    download(served.url + name, tmp_path / name, pause_s=0.01)
    assert served.requests[-1][1] == "bytes=20000-"
    assert (tmp_path / name).read_bytes() == (served.folder / name).read_bytes()


def test_a_file_that_changed_meanwhile_is_fetched_anew(served: FileServer, tmp_path: Path) -> None:
    name = generator.SMALL_FILES[1]
    served.drop_after, served.drops = 1000, 1
    with pytest.raises(DownloadError):
        download(served.url + name, tmp_path / name, attempts=1)
    (served.folder / name).write_text('{"new": 1}', encoding="utf-8")
    served.etag = '"two"'
    download(served.url + name, tmp_path / name)
    assert json.loads((tmp_path / name).read_text("utf-8")) == {"new": 1}


def test_wrong_checksums_pages_and_refusals_say_what_happened(served: FileServer, tmp_path: Path) -> None:
    name = generator.SMALL_FILES[2]
    with pytest.raises(DownloadError, match=r"checksum is \w{64}, expected 0000"):
        download(served.url + name, tmp_path / name, "0" * 64)
    assert list(tmp_path.glob(f"{name}*")) == []
    with pytest.raises(DownloadError, match="404"):
        download(served.url + "nothing.json", tmp_path / name)
    served.html = True
    with pytest.raises(DownloadError, match="web page"):
        download(served.url + name, tmp_path / name)
    with pytest.raises(DownloadError, match="is not a url"):
        download("somewhere/file.json", tmp_path / name)
    served.html, served.status = False, 503
    with pytest.raises(DownloadError, match="2 attempts .*503"):
        download(served.url + name, tmp_path / name, attempts=2, pause_s=0.01)


@pytest.mark.parametrize("url", ["http://", "https:///x", "http://host/a b.json", "http://host:99999/x", "ftp://h/x", ""])
def test_urls_that_cannot_work_are_refused_at_once(url: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="is not a url"):
        download(url, tmp_path / "x.json", pause_s=60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("checksum", ["", "abc", "z" * 64, "0" * 65])
def test_checksums_that_are_none_are_refused_before_anything_is_fetched(
    checksum: str, served: FileServer, tmp_path: Path
) -> None:
    with pytest.raises(DownloadError, match="not a SHA-256 checksum"):
        download(served.url + generator.SMALL_FILES[0], tmp_path / "x.json", checksum)
    assert served.requests == []


def test_one_process_fetches_a_file_at_a_time(served: FileServer, tmp_path: Path) -> None:
    name = generator.SMALL_FILES[0]
    with _only_fetcher(tmp_path / f"{name}.part"):
        with pytest.raises(DownloadError, match="another process is fetching"):
            download(served.url + name, tmp_path / name)
    assert served.requests == []
    download(served.url + name, tmp_path / name)
    assert [path.name for path in tmp_path.glob("items*")] == [name]


def test_a_file_that_cannot_be_written_is_not_tried_again_and_goes_on_later(served: FileServer, tmp_path: Path) -> None:
    """A limit on file sizes stands for the full disk: one request, the bytes that fit stay and are continued."""
    name = generator.SMALL_FILES[0]
    code = (
        "import resource, sys; from pathlib import Path;"
        "from agent_system.environments.env_package.webshop.official_files import download;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY));\n"
        "try: download(sys.argv[1], Path(sys.argv[2]), pause_s=60)\n"
        "except ValueError as error: print(error)"
    )
    arguments = [sys.executable, "-c", code, served.url + name, str(tmp_path / name)]
    found = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert "cannot be written ([Errno 27] File too large)" in found.stdout, found.stderr
    assert len(served.requests) == 1
    download(served.url + name, tmp_path / name)
    assert served.requests[-1][1] == "bytes=5000-"
    assert (tmp_path / name).read_bytes() == (served.folder / name).read_bytes()


@pytest.mark.parametrize("note", ["", "[]", '{"url": 5}', '{"url": "URL", "size": "many", "validator": "x"}', "{" * 9999])
def test_a_damaged_note_beside_a_partial_file_only_costs_the_part(note: str, served: FileServer, tmp_path: Path) -> None:
    name = generator.SMALL_FILES[1]
    (tmp_path / f"{name}.part").write_bytes(b"something else")
    (tmp_path / f"{name}.part.json").write_text(note.replace("URL", served.url + name), encoding="utf-8")
    download(served.url + name, tmp_path / name)
    assert (tmp_path / name).read_bytes() == (served.folder / name).read_bytes()


def test_a_file_that_is_there_is_not_fetched_again(served: FileServer, tmp_path: Path) -> None:
    name = generator.SMALL_FILES[0]
    download(served.url + name, tmp_path / name)
    download(served.url + name, tmp_path / name, file_sha256(served.folder / name))
    assert len(served.requests) == 1
    (tmp_path / name).write_text("[]", encoding="utf-8")
    download(served.url + name, tmp_path / name, file_sha256(served.folder / name))
    assert len(served.requests) == 2


def test_report_counts_what_the_shop_will_use(tmp_path: Path) -> None:
    paths = generator.write_dataset(tmp_path, 200, 1)
    products = list(generator.iter_generated(200, 1))
    records = json.loads(paths[0].read_text("utf-8"))
    records += [records[0], {"asin": "B0TOOLONGASIN", "name": "x"}, {"name": "no asin"}]
    paths[0].write_text(json.dumps(records), encoding="utf-8")
    report = check_folder(*paths)
    assert report.products == 200 and sum(report.skipped.values()) == 3
    goals = 0
    for product in products:
        combinations = 1
        for values in product.options.values():
            combinations *= len(values)
        goals += combinations
    assert report.synthetic_goals == goals
    assert report.human_goals == sum(len(product.human) for product in products)
    assert report.with_price_range == sum(len(product.prices) == 2 for product in products)
    assert any("human goals" in problem for problem in report.problems)
    assert f"{goals:,} synthetic goals" in "\n".join(report.lines())


def test_damage_names_file_and_record(tmp_path: Path) -> None:
    paths = generator.write_dataset(tmp_path, 20, 1)
    text = paths[0].read_text("utf-8")
    paths[0].write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(DataFileError, match=r"items_shuffle_1000.json: record \d+"):
        check_folder(*paths)
    paths[0].write_text("", encoding="utf-8")
    with pytest.raises(DataFileError, match="empty"):
        check_folder(*paths)


def test_the_command_line_from_fetch_to_catalogue(
    served: FileServer, tmp_path: Path, script: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder, report = tmp_path / "data", tmp_path / "report.json"
    checksum = file_sha256(served.folder / generator.SMALL_FILES[0])
    fetch = ["fetch", str(folder), "--base-url", served.url, "--sha256", f"{generator.SMALL_FILES[0]}={checksum}"]
    assert script.main([*fetch, "--json", str(report)]) == 0
    assert json.loads(report.read_text("utf-8"))["products"] == 150
    assert script.main(["convert", str(folder), "--cache-dir", str(tmp_path / "cache")]) == 0
    assert "150 products" in caplog.text and "synthetic goals: " in caplog.text and "human goals: " in caplog.text
    built = sorted((tmp_path / "cache").iterdir())
    load_shop(data_dir=str(folder), cache_dir=str(tmp_path / "cache"), human_goals=True)
    assert sorted((tmp_path / "cache").iterdir()) == built, "the first run finds everything built"
    assert script.main(["check", str(folder), "--full"]) == 1
    assert "use_small" in caplog.text
    assert script.main(["fetch", str(tmp_path / "none")]) == 1
    assert "--base-url" in caplog.text
    assert script.main(["fetch", str(folder), "--url", "x.json=http://a"]) == 1
    assert script.main(["generate", str(tmp_path / "made"), "--num-products", "5"]) == 0
    assert len(json.loads((tmp_path / "made" / generator.SMALL_FILES[0]).read_text("utf-8"))) == 5
    assert script.main(["check", str(folder), "--num-products", "0"]) == 1
    assert "--num-products=0 has to be at least 1" in caplog.text
    assert script.main(["check", str(folder), "--json", str(tmp_path / "none" / "none" / "report.json")]) == 1
    assert "No such file" in caplog.text
