"""``protocol.weights.manifest``: the manifest's bytes, its rules, and the checking of chunks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.constants import CHUNK_BYTES, MAX_MANIFEST_BYTES
from protocol.errors import LocalError, PeerError
from protocol.weights.manifest import Manifest, TensorInfo, chunk_count, chunk_hashes, verify_chunk, whole_hash

VECTOR = json.loads((Path(__file__).parents[2] / "vectors" / "manifest.json").read_text())
ROWS = (("model.embed_tokens.weight", "F32", (3, 2)), ("model.norm.weight", "BF16", (4,)), ("scale", "F16", ()))
DATA = bytes(range(24)) + b"bfloat16" + b"f2"
MANIFEST = Manifest.of_file(ROWS, DATA, 123_456_789)


def of_bytes(size: int) -> tuple[bytes, Manifest]:
    data = bytes(index % 251 for index in range(1000)) * (size // 1000 + 1)
    data = data[:size]
    return data, Manifest.of_file([("weight", "F16", (size // 2,))], data, 1)


def value_of(manifest: Manifest) -> Any:
    return codec.decode(manifest.encode(), max_bytes=MAX_MANIFEST_BYTES)


def test_the_encoding_is_the_golden_one() -> None:
    assert MANIFEST.encode().hex() == VECTOR["bytes"]
    assert MANIFEST.digest.hex() == VECTOR["digest"]
    assert MANIFEST.whole.hex() == VECTOR["whole"]
    assert Manifest.parse(bytes.fromhex(VECTOR["bytes"])) == MANIFEST


names = st.builds("{}{}".format, st.sampled_from("aZ0_-"), st.text("bY9_.-", max_size=8))
shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)
tensors = st.lists(
    st.tuples(names, st.sampled_from(["F32", "BF16", "F16"]), shapes),
    min_size=1,
    max_size=4,
    unique_by=lambda row: row[0],
)


@settings(max_examples=50, deadline=None)
@given(tensors, st.integers(1, 2**63 - 1))
def test_parsing_inverts_encoding(rows: list[tuple[str, str, tuple[int, ...]]], checksum: int) -> None:
    size = sum(TensorInfo(*row).size for row in rows)
    manifest = Manifest.of_file(rows, bytes(size), checksum)
    assert Manifest.parse(manifest.encode()) == manifest


def test_a_flipped_bit_is_refused_or_names_another_manifest() -> None:
    data = MANIFEST.encode()
    for place in range(len(data)):
        for bit in (0, 4, 7):
            altered = bytearray(data)
            altered[place] ^= 1 << bit
            try:
                parsed = Manifest.parse(bytes(altered))
            except PeerError:
                continue
            assert parsed != MANIFEST
            assert parsed.encode() == altered


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_noise_raises_nothing_but_a_peer_error(data: bytes) -> None:
    with pytest.raises(PeerError):
        Manifest.parse(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((0,), 2),
        ((1,), 35),
        ((1,), 0),
        ((2,), []),
        ((2, 0, 0), "scale"),
        ((2, 0, 0), "../weights"),
        ((2, 0, 0), ".hidden"),
        ((2, 0, 0), "a b"),
        ((2, 0, 0), ""),
        ((2, 0, 0), "n" * 201),
        ((2, 0, 1), "F64"),
        ((2, 0, 2), [3, 3]),
        ((2, 0, 2), [3, 0]),
        ((2, 0, 2), [1] * 7 + [3, 2]),
        ((3,), b""),
        ((3,), bytes(64)),
        ((3,), bytes(31)),
        ((4,), 0),
    ],
)
def test_what_breaks_a_rule_is_refused(path: tuple[int, ...], value: Any) -> None:
    altered = value_of(MANIFEST)
    part = altered
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    with pytest.raises(PeerError):
        Manifest.parse(codec.encode(altered))


def test_a_manifest_that_others_would_refuse_is_our_own_mistake() -> None:
    with pytest.raises(LocalError):
        replace(MANIFEST, checksum=0).encode()
    with pytest.raises(LocalError):
        replace(MANIFEST, chunks=()).encode()
    with pytest.raises(LocalError):
        Manifest.of_file(ROWS, DATA + b"!", 1)


def test_tensors_lie_one_after_the_other() -> None:
    assert MANIFEST.tensor_offsets() == {
        "model.embed_tokens.weight": (0, 24),
        "model.norm.weight": (24, 8),
        "scale": (32, 2),
    }


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        (2, [2]),
        (CHUNK_BYTES, [CHUNK_BYTES]),
        (CHUNK_BYTES + 2, [CHUNK_BYTES, 2]),
        (2 * CHUNK_BYTES, [CHUNK_BYTES, CHUNK_BYTES]),
    ],
)
def test_only_the_last_chunk_is_short(size: int, sizes: list[int]) -> None:
    data, manifest = of_bytes(size)
    assert chunk_count(size) == len(manifest.chunks) == len(sizes)
    assert [manifest.chunk_size(index) for index in range(len(sizes))] == sizes
    for index in range(len(sizes)):
        chunk = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        verify_chunk(manifest, index, chunk)
        assert manifest.chunks[index] == blake3(chunk).digest()
    assert manifest.whole == blake3(b"".join(manifest.chunks)).digest() == whole_hash(chunk_hashes(data))
    Manifest.parse(manifest.encode())


def test_a_wrong_chunk_is_the_senders_fault() -> None:
    data, manifest = of_bytes(CHUNK_BYTES + 2)
    with pytest.raises(PeerError, match="hash"):
        verify_chunk(manifest, 0, data[1 : CHUNK_BYTES + 1])
    with pytest.raises(PeerError, match="hash"):
        verify_chunk(manifest, 1, b"??")
    with pytest.raises(PeerError, match="bytes"):
        verify_chunk(manifest, 1, data[CHUNK_BYTES - 1 :])
    with pytest.raises(PeerError, match="bytes"):
        verify_chunk(manifest, 0, data)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_chunk_that_does_not_exist_is_our_own_mistake(index: int) -> None:
    _, manifest = of_bytes(CHUNK_BYTES + 2)
    with pytest.raises(LocalError):
        verify_chunk(manifest, index, b"")


def test_a_name_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Manifest.of_file([("a", "F32", (2,))], bytes(8), 1)
    data, digest = made.encode(), made.digest
    monkeypatch.setattr(Manifest, "encode", None)  # a tenth of a second for a large one
    assert made.digest == digest
    assert Manifest.parse(data).digest == digest
    assert Manifest.parse(data) == made
