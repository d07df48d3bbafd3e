"""Reading JSON files one record at a time."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_system.environments.env_package.webshop import json_stream
from agent_system.environments.env_package.webshop.json_stream import DataFileError, iter_array, iter_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=6), children, max_size=4),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    values=st.lists(VALUES, max_size=8),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_equals_json_load(values: list, chunk: int, indent: int | None, ascii_only: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    original, json_stream._CHUNK = json_stream._CHUNK, chunk
    try:
        path.write_text(json.dumps(values, indent=indent, ensure_ascii=ascii_only), encoding="utf-8")
        assert list(iter_array(path)) == values
        members = {str(i): value for i, value in enumerate(values)}
        path.write_text(json.dumps(members, indent=indent, ensure_ascii=ascii_only), encoding="utf-8")
        assert dict(iter_object(path)) == members
    finally:
        json_stream._CHUNK = original


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('[{"asin": "A"}, {"asin": ]', "record 1"),
        ('[{"asin": "A"}, {"asin": "B"', "record 1"),
        ('[{"asin": "A"} {"asin": "B"}]', "record 1"),
        ('[{"asin": "A"}, {"asin": "B\n"}]', "record 1"),
        ('[{"asin": "A"}', "record 1"),
        ("", "at its start"),
        ('{"a": 1}', "at its start"),
        ("[1] x", "after the last record"),
        ("[tru", "record 0"),
    ],
)
def test_damage_names_file_and_record(text: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "items.json"
    path.write_text(text)
    with pytest.raises(DataFileError, match=f"items.json: {where}"):
        list(iter_array(path))


@pytest.mark.parametrize(
    ("text", "said"), [("[" + "9" * 6000 + "]", "record 0: .*digits"), ("[" * 200_000, "record 0: nested too deeply")]
)
def test_values_that_python_cannot_hold_are_damage(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "items.json"
    path.write_text(text)
    with pytest.raises(DataFileError, match=said):
        list(iter_array(path))


def test_damage_names_the_entry(tmp_path: Path) -> None:
    path = tmp_path / "ins.json"
    path.write_text('{"B01": {"attributes": []}, "B02": {"attributes": [}}')
    with pytest.raises(DataFileError, match=r"ins.json: entry 1 \(B02\)"):
        dict(iter_object(path))
    path.write_bytes(b'{"B01": "\xff"}')
    with pytest.raises(DataFileError, match="not UTF-8"):
        dict(iter_object(path))


def test_damage_in_the_middle_is_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong record must not make the reader swallow the rest of a file of gigabytes."""
    path = tmp_path / "items.json"
    path.write_text("[" + '{"asin": "A", oops},' * 100_000 + "1]")
    monkeypatch.setattr(json_stream, "_CHUNK", 1000)
    reads = []
    original = json_stream._Reader._more
    monkeypatch.setattr(json_stream._Reader, "_more", lambda self: reads.append(1) or original(self))
    with pytest.raises(DataFileError, match="record 0"):
        list(iter_array(path))
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (gzip.compress(b'[{"asin": "A"}]')[:20], "a gzip archive: unpack it first"),
        (b"PK\x03\x04\x14\x00", "a zip archive"),
        (b"\n<!DOCTYPE html><html>", "the page of a download"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
    ],
)
def test_files_that_are_no_json_say_what_they_are(data: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "items.json"
    path.write_bytes(data)
    for read in (iter_array, iter_object):
        with pytest.raises(DataFileError, match=f"items.json: not a JSON file but .*{what}"):
            list(read(path))


@pytest.mark.parametrize("data", [b"[1, \xff]", "[1]".encode("utf-16"), b"[" * 100_000, b"[" + b"9" * 5000 + b"]"])
def test_bytes_that_are_no_json_name_the_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "items.json"
    path.write_bytes(data)
    with pytest.raises(DataFileError, match="items.json: (record 0|at its start)"):
        list(iter_array(path))
    with pytest.raises(DataFileError, match="cannot be read"):
        list(iter_array(tmp_path))
