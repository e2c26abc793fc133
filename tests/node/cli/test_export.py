"""Exporting a version: a directory that other programs load, verified on the way, and never a part of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from node.cli import export
from node.cli.export import ExportedVersion, header, tokenizer_config, write
from node.domain.founding import MODEL
from node.errors import UserError
from protocol.constants import CHUNK_BYTES
from protocol.weights.manifest import Manifest

CONFIG = (MODEL / "config.json").read_bytes()
TOKENIZER = (MODEL / "tokenizer.json").read_bytes()


def nothing(done: int, total: int) -> None:
    del done, total


def chosen(folder: Path, rows: Any, data: bytes) -> ExportedVersion:
    whole = folder / "whole.bin"
    whole.write_bytes(data)
    return ExportedVersion(7, Manifest.of_file(rows, data, 1), whole, CONFIG, TOKENIZER)


def starter(folder: Path) -> ExportedVersion:
    """The starter model as a version."""
    tensors = load_file(MODEL / "model.safetensors")
    rows = [(name, "F32", tensor.shape) for name, tensor in tensors.items()]
    return chosen(folder, rows, b"".join(tensor.tobytes() for tensor in tensors.values()))


def test_the_files_hold_the_version(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    write(starter(tmp_path), tmp_path / "out", progress=lambda done, total: told.append((done, total)))
    expected, found = load_file(MODEL / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected)
    assert (tmp_path / "out" / "config.json").read_bytes() == CONFIG
    assert told[-1][0] == told[-1][1]
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as opened:
        assert opened.metadata() == {"format": "pt"}  # without it transformers refuses the file


def test_other_types_and_odd_sizes_are_written_as_they_are(tmp_path: Path) -> None:
    rows = [("a", "BF16", (3,)), ("b", "F32", (CHUNK_BYTES // 4,)), ("c", "F16", ())]
    data = bytes(range(256)) * (CHUNK_BYTES // 256 + 1)
    one = chosen(tmp_path, rows, data[: 6 + CHUNK_BYTES + 2])
    write(one, tmp_path / "out", progress=nothing)
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    head = header(one.manifest)
    assert len(head) % export.ALIGNMENT == 0
    assert raw == head + one.whole.read_bytes()
    table = json.loads(head[8:])
    assert table["c"] == {"dtype": "F16", "shape": [], "data_offsets": [6 + CHUNK_BYTES, 8 + CHUNK_BYTES]}


def test_transformers_loads_it_and_gives_the_same_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write(starter(tmp_path), tmp_path / "out", progress=nothing)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    expected = load_file(MODEL / "model.safetensors")
    state = model.state_dict()
    assert all((state[name].numpy() == tensor).all() for name, tensor in expected.items())
    assert tokenizer.eos_token_id == json.loads(CONFIG)["eos_token_id"]


def test_the_tokenizers_settings_follow_from_the_configuration() -> None:
    found = tokenizer_config(CONFIG, TOKENIZER)
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["model_max_length"] == 512
    assert "bos_token" not in found
    several = json.dumps(json.loads(CONFIG) | {"eos_token_id": [1, 0]}).encode()
    assert tokenizer_config(several, TOKENIZER)["eos_token"] == found["eos_token"]


def test_a_damaged_version_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    one = starter(tmp_path)
    data = bytearray(one.whole.read_bytes())
    data[1000] ^= 1
    one.whole.write_bytes(data)
    with pytest.raises(UserError, match="version 7 is damaged"):
        write(one, tmp_path / "out", progress=nothing)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole.bin"]


def test_a_folder_that_holds_something_is_not_touched(tmp_path: Path) -> None:
    one = starter(tmp_path)
    (tmp_path / "out").mkdir()
    write(one, tmp_path / "out", progress=nothing)  # empty: it becomes the export
    with pytest.raises(UserError, match="not empty"):
        write(one, tmp_path / "out", progress=nothing)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        write(one, tmp_path / "file", progress=nothing)
    with pytest.raises(UserError, match="cannot be made"):
        write(one, tmp_path / "file" / "out", progress=nothing)
    assert (tmp_path / "file").read_text() == "mine"
