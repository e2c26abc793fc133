"""``protocol.weights.delta``: the delta manifest's bytes and rules, telling it from a manifest, and when deltas pay."""

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
from protocol.constants import CHUNK_BYTES, DELTA_BLOCK_BYTES, MAX_MANIFEST_BYTES
from protocol.errors import LocalError, PeerError
from protocol.weights.delta import (
    MAX_CHAIN,
    DeltaManifest,
    Segment,
    Speed,
    block_count,
    block_size,
    chain_pays,
    largest_frame,
    largest_manifest,
    parse_chunk_list,
    seconds_for_chain,
    seconds_for_whole,
    segments_at,
    unit_of,
)
from protocol.weights.manifest import ChunkList, Manifest, chunk_hashes, verify_chunk

VECTOR = json.loads((Path(__file__).parents[2] / "vectors" / "delta.json").read_text())
ROWS = (("norm", "BF16", (4,)), ("weight", "BF16", (3 * DELTA_BLOCK_BYTES // 2 - 4,)), ("bias", "BF16", (5,)))
SIZE = 3 * DELTA_BLOCK_BYTES + 10


def manifest_of(fill: int, rows: Any = ROWS) -> Manifest:
    return Manifest.of_file(rows, bytes([fill]) * SIZE, fill)


BASE, TARGET = manifest_of(1), manifest_of(2)
SEGMENTS = (Segment(0, 3, (12, 12), (12,)), Segment(2, 1, (9,), (9, 10)), Segment(3, 5, (14,), (14,)))
FILE = bytes(range(92))


def delta_of(segments: tuple[Segment, ...], file: bytes) -> DeltaManifest:
    return DeltaManifest(BASE.digest, TARGET.digest, 2, SIZE, len(file), segments, tuple(chunk_hashes(file)))


DELTA = delta_of(SEGMENTS, FILE)


def value_of(delta: DeltaManifest) -> Any:
    return codec.decode(delta.encode(), max_bytes=MAX_MANIFEST_BYTES)


def test_the_encoding_is_the_golden_one() -> None:
    assert DELTA.encode().hex() == VECTOR["bytes"]
    assert DELTA.digest.hex() == VECTOR["digest"]
    assert DeltaManifest.parse(bytes.fromhex(VECTOR["bytes"])) == DELTA


def test_a_chunk_list_is_one_or_the_other() -> None:
    assert parse_chunk_list(DELTA.encode()) == DELTA
    assert parse_chunk_list(TARGET.encode()) == TARGET
    for data in (b"", b"\x95", b"\x98", b"\x90", bytes(40)):
        with pytest.raises(PeerError):
            parse_chunk_list(data)


def test_a_delta_travels_in_chunks_like_a_version() -> None:
    file = bytes(CHUNK_BYTES) + b"tail"
    changed = DELTA_BLOCK_BYTES // 2
    frames = (CHUNK_BYTES + 4 - 20, 20)
    listing: ChunkList = delta_of((Segment(1, changed, frames[:1], frames[1:]),), file)
    assert [listing.chunk_size(index) for index in range(len(listing.chunks))] == [CHUNK_BYTES, 4]
    verify_chunk(listing, 1, b"tail")
    with pytest.raises(PeerError, match="hash"):
        verify_chunk(listing, 1, b"liat")
    with pytest.raises(LocalError):
        listing.chunk_size(2)
    assert listing.digest == blake3(listing.encode()).digest()


def test_a_flipped_bit_is_refused_or_names_another_delta() -> None:
    data = DELTA.encode()
    for place in range(len(data)):
        for bit in (0, 4, 7):
            altered = bytearray(data)
            altered[place] ^= 1 << bit
            try:
                parsed = DeltaManifest.parse(bytes(altered))
            except PeerError:
                continue
            assert parsed != DELTA
            assert parsed.encode() == altered


@settings(max_examples=40)
@given(st.binary(max_size=200))
def test_noise_raises_nothing_but_a_peer_error(data: bytes) -> None:
    for parse in (DeltaManifest.parse, parse_chunk_list):
        with pytest.raises(PeerError):
            parse(data)


@settings(max_examples=60)
@given(st.data())
def test_an_altered_field_is_refused_or_parses_to_what_it_says(data: st.DataObject) -> None:
    value = value_of(DELTA)
    part = value
    while True:
        place = data.draw(st.integers(0, len(part) - 1))
        if not isinstance(part[place], list) or not part[place] or data.draw(st.booleans()):
            break
        part = part[place]
    part[place] = data.draw(st.one_of(st.integers(0, 2**63 - 1), st.binary(max_size=64), st.none(), st.just([])))
    altered = codec.encode(value)
    try:
        parsed = DeltaManifest.parse(altered)
    except PeerError:
        return
    assert parsed.encode() == altered


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((0,), 2),
        ((1,), bytes(31)),
        ((3,), 1),
        ((3,), 3),
        ((3,), 8),
        ((4,), SIZE + 1),  # not whole values
        ((4,), 3 * DELTA_BLOCK_BYTES),  # there is no block 3 then
        ((4,), 2 * len(FILE) - 2),
        ((5,), 91),
        ((5,), 0),
        ((6, 0, 0), 2),  # twice
        ((6, 2, 0), 1),  # descending
        ((6, 2, 0), 4),
        ((6, 0, 1), 0),
        ((6, 0, 1), DELTA_BLOCK_BYTES // 2 + 1),
        ((6, 2, 1), 6),  # the last block has five values
        ((6, 0, 2), []),
        ((6, 0, 2), [6, 6, 6, 6]),
        ((6, 0, 3), []),
        ((6, 1, 3), [9, 5, 5]),  # three bytes of a value of two
        ((6, 0, 2), [0, 24]),
        ((7,), b""),
        ((7,), bytes(64)),
    ],
)
def test_what_breaks_a_rule_is_refused(path: tuple[int, ...], value: Any) -> None:
    altered = value_of(DELTA)
    part = altered
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    with pytest.raises(PeerError):
        DeltaManifest.parse(codec.encode(altered))


def test_a_frame_larger_than_its_content_needs_is_refused() -> None:
    most = largest_frame(1)
    delta_of((Segment(0, 1, (most,), (most,)),), bytes(2 * most)).encode()
    with pytest.raises(LocalError, match="frame"):
        delta_of((Segment(0, 1, (most + 1,), (most,)),), bytes(2 * most + 1)).encode()


def test_a_delta_of_more_than_half_the_whole_is_refused() -> None:
    changed = DELTA_BLOCK_BYTES // 2
    segments = tuple(Segment(block, changed, (changed,), (changed,)) for block in (0, 1))
    with pytest.raises(LocalError, match="worth"):
        delta_of(segments, bytes(4 * changed)).encode()


def test_it_fits_the_two_versions_it_names_and_no_others() -> None:
    DELTA.check(BASE, TARGET)
    for base, target in ((TARGET, BASE), (BASE, BASE), (TARGET, TARGET)):
        with pytest.raises(PeerError, match="other versions"):
            DELTA.check(base, target)
    other = manifest_of(1, (("weights", "BF16", (SIZE // 2,)),))
    with pytest.raises(PeerError, match="fit"):
        replace(DELTA, base=other.digest).check(other, TARGET)
    with pytest.raises(PeerError, match="fit"):
        replace(DELTA, unit=4).check(BASE, TARGET)


def test_values_are_as_wide_as_the_narrowest_tensor() -> None:
    half, full = ("a", "F16", (2,)), ("b", "F32", (2,))
    assert unit_of(Manifest.of_file([half, full], bytes(12), 1)) == 2
    assert unit_of(Manifest.of_file([full], bytes(8), 1)) == 4


def test_blocks_and_segments_lie_one_after_the_other() -> None:
    assert block_count(SIZE) == 4
    assert [block_size(SIZE, block) for block in range(4)] == [DELTA_BLOCK_BYTES] * 3 + [10]
    assert segments_at(DELTA.segments) == [0, 36, 64]
    assert DELTA.changed == 9


def test_the_largest_manifest_has_room_for_whatever_its_whole_allows() -> None:
    changed, big = DELTA_BLOCK_BYTES // 2, 40 * DELTA_BLOCK_BYTES
    frame = (changed,) * 3
    row = [2**32, changed, list(frame), [changed] * 4]
    assert len(codec.encode(row)) <= 64
    head = codec.encode([1, bytes(32), bytes(32), 4, 2**63 - 1, 2**62 - 1, [], b""])
    assert len(head) + 10 <= 128
    # And hardly any for more.
    assert largest_manifest(big) < 128 + 40 * 64 + 32 * 80 + 1
    assert len(DELTA.encode()) <= largest_manifest(SIZE)
    assert largest_manifest(2**50) == MAX_MANIFEST_BYTES


GB = 10**9
SPEED = Speed(receive=GB / 10, hash=GB, apply=GB / 2, start=0.5)


def test_the_whole_is_hashed_while_it_arrives() -> None:
    assert seconds_for_whole(GB, SPEED) == 10
    assert seconds_for_whole(GB, replace(SPEED, receive=4 * GB)) == 1


def test_a_chain_costs_its_bytes_and_a_whole_made_each() -> None:
    assert seconds_for_chain([GB // 100] * 2, GB, SPEED) == pytest.approx(0.5 + 0.2 + 4)


@pytest.mark.parametrize(
    ("missing", "deltas", "speed", "pays"),
    [
        (GB, [GB // 100], SPEED, True),
        (GB, [GB // 100] * MAX_CHAIN, SPEED, True),
        (GB, [GB // 1000] * (MAX_CHAIN + 1), SPEED, False),
        (GB, [], SPEED, False),
        (0, [GB // 100], SPEED, False),
        (GB // 10, [GB // 100], SPEED, False),  # most of the whole is here already
        (GB, [GB // 2], SPEED, True),
        (GB, [GB // 2] * 2, SPEED, False),
        (GB, [GB // 100], replace(SPEED, receive=10 * GB), False),  # a link as fast as the disk
        (GB // 1000, [1000], SPEED, False),  # so small that starting takes longer
    ],
)
def test_what_takes_less_time_is_taken(missing: int, deltas: list[int], speed: Speed, pays: bool) -> None:
    assert chain_pays(missing, deltas, max(missing, GB // 1000) if missing < GB // 100 else GB, speed) is pays


@settings(max_examples=40)
@given(st.integers(0, 2**40), st.lists(st.integers(0, 2**30), min_size=1, max_size=MAX_CHAIN))
def test_a_slower_link_never_speaks_against_deltas_that_are_smaller(missing: int, deltas: list[int]) -> None:
    slower = replace(SPEED, receive=SPEED.receive / 10)
    if sum(deltas) <= missing and chain_pays(missing, deltas, 2**40, SPEED):
        assert chain_pays(missing, deltas, 2**40, slower)
