"""``node.workers.delta_blocks``: what is decoded is what was encoded, and anything else is refused before it costs
memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from node.workers.delta_blocks import SegmentDecoder, SegmentEncoder, value_type
from protocol.errors import PeerError
from protocol.weights.delta import Segment, largest_frame


def patched(base: bytes, segment: Segment, data: bytes, unit: int) -> bytes:
    values = np.frombuffer(base, value_type(unit)).copy()
    positions, differences = SegmentDecoder(unit).decode(segment, data, len(values))
    values[positions] += differences
    return values.tobytes()


def encoded(base: bytes, target: bytes, unit: int) -> tuple[Segment, bytes]:
    found = SegmentEncoder(unit).encode(7, memoryview(base), memoryview(target))
    assert found is not None
    return found


@settings(max_examples=50)
@given(st.sampled_from([2, 4]), st.data())
def test_decoding_inverts_encoding(unit: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 300))
    base = data.draw(st.binary(min_size=count * unit, max_size=count * unit))
    values = np.frombuffer(base, value_type(unit)).copy()
    for place in data.draw(st.sets(st.integers(0, count - 1), max_size=20)):
        values[place] = data.draw(st.integers(0, 256**unit - 1))
    target = values.tobytes()
    found = SegmentEncoder(unit).encode(7, memoryview(base), memoryview(target))
    if base == target:
        assert found is None
        return
    assert found is not None
    segment, stored = found
    assert len(stored) == segment.size
    assert all(size <= largest_frame(segment.changed) for size in (*segment.gaps, *segment.differences))
    assert patched(base, segment, stored, unit) == target


@pytest.mark.parametrize("unit", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 65_536, 70_000, 2**21])
def test_blocks_of_any_size_with_a_change_at_either_end(unit: int, count: int) -> None:
    random = np.random.default_rng(count)
    base = random.integers(0, 256, count * unit, dtype=np.uint8).tobytes()
    values = np.frombuffer(base, value_type(unit)).copy()
    values[[0, -1]] ^= np.array([1], value_type(unit))
    target = values.tobytes()
    segment, stored = encoded(base, target, unit)
    assert segment.changed == min(count, 2)
    assert patched(base, segment, stored, unit) == target


@pytest.mark.parametrize("unit", [2, 4])
def test_a_block_of_all_new_values(unit: int) -> None:
    random = np.random.default_rng(1)
    base, target = (random.integers(0, 256, 100_000 * unit, dtype=np.uint8).tobytes() for _ in range(2))
    segment, stored = encoded(base, target, unit)
    assert patched(base, segment, stored, unit) == target
    assert len(stored) < len(target) * 1.2


def test_extreme_differences_wrap_around() -> None:
    old = np.array([0, 0, 0, 65535, 1, 32768, 0x7F80], "<u2")
    new = np.array([65535, 32768, 32767, 0, 32769, 0, 0xFF80], "<u2")
    segment, stored = encoded(old.tobytes(), new.tobytes(), 2)
    assert patched(old.tobytes(), segment, stored, 2) == new.tobytes()


def test_neighbours_in_few_places_take_little_more_than_their_entropy() -> None:
    random = np.random.default_rng(5)
    old = random.integers(0, 2**16, 2**21, dtype=np.uint16)
    changed = random.random(2**21) < 0.0035
    new = old + np.where(changed, random.choice(np.array([1, -1], np.int16), 2**21), 0).astype(np.uint16)
    segment, stored = encoded(old.tobytes(), new.tobytes(), 2)
    share = segment.changed / 2**21
    entropy = 2**21 * -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) + segment.changed
    assert len(stored) * 8 < 1.2 * entropy


GAPS = zstandard.ZstdCompressor().compress(bytes([0, 3, 5]))
DIFFERENCES = zstandard.ZstdCompressor().compress(bytes([0, 1, 2]))
GOOD = Segment(0, 3, (len(GAPS),), (len(DIFFERENCES),))


def decode(segment: Segment, data: bytes, values: int = 11) -> Any:
    return SegmentDecoder(2).decode(segment, data, values)


def frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def streams(gaps: list[bytes], differences: list[bytes], changed: int = 3) -> tuple[Segment, bytes]:
    sizes = [tuple(len(plane) for plane in stream) for stream in (gaps, differences)]
    return Segment(0, changed, sizes[0], sizes[1]), b"".join(gaps + differences)


def test_the_bytes_mean_what_the_specification_says() -> None:
    positions, differences = decode(GOOD, GAPS + DIFFERENCES)
    assert positions.tolist() == [0, 4, 10]
    assert differences.tolist() == [65535, 1, 65534]


def test_a_position_beyond_the_end_is_refused() -> None:
    with pytest.raises(PeerError, match="beyond"):
        decode(GOOD, GAPS + DIFFERENCES, values=10)
    far = frame(b"\xff\xff\xff")
    with pytest.raises(PeerError, match="beyond"):
        decode(*streams([far, far, far], [DIFFERENCES]), values=2**21)


def test_a_difference_of_nothing_is_refused() -> None:
    full = frame(b"\x00\xff\x00")
    with pytest.raises(PeerError, match="difference of 0"):
        decode(*streams([GAPS], [full, full]))


def test_a_plane_of_zeros_on_top_is_refused() -> None:
    zeros = frame(bytes(3))
    with pytest.raises(PeerError, match="plane of nothing"):
        decode(*streams([GAPS, zeros], [DIFFERENCES]))


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    bomb = frame(bytes(200 << 20))
    for gaps, differences in (([bomb], [DIFFERENCES]), ([GAPS], [bomb])):
        with pytest.raises(PeerError, match="another size"):
            decode(*streams(gaps, differences))
    hidden = frame(bytes(8 << 20), write_content_size=False)
    with pytest.raises(PeerError, match="another size"):
        decode(*streams([hidden], [DIFFERENCES]))


def test_a_frame_that_claims_less_than_it_holds_is_refused() -> None:
    lying = bytearray(frame(bytes(200)))
    place = lying.index(200)  # the content size, one byte behind the descriptor
    lying[place] = 3
    with pytest.raises(PeerError):
        decode(*streams([bytes(lying)], [DIFFERENCES]))


@pytest.mark.parametrize(
    "alter",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
    ],
)
def test_a_stream_cut_short_or_too_long_is_refused(alter: Any) -> None:
    with pytest.raises(PeerError, match="cut short"):
        decode(GOOD, alter(GAPS + DIFFERENCES))


def test_frames_cut_elsewhere_than_the_manifest_says_are_refused() -> None:
    with pytest.raises(PeerError):
        decode(replace(GOOD, gaps=(len(GAPS) - 1,), differences=(len(DIFFERENCES) + 1,)), GAPS + DIFFERENCES)


def test_something_behind_a_frame_is_refused() -> None:
    with pytest.raises(PeerError):
        decode(*streams([GAPS + b"more"], [DIFFERENCES]))


def test_another_number_of_changes_is_refused() -> None:
    with pytest.raises(PeerError, match="another size"):
        decode(replace(GOOD, changed=4), GAPS + DIFFERENCES)


@settings(max_examples=80)
@given(st.binary(min_size=1, max_size=60), st.integers(1, 2000), st.data())
def test_noise_raises_nothing_but_a_peer_error(noise: bytes, changed: int, data: st.DataObject) -> None:
    split = data.draw(st.integers(0, len(noise)))
    with pytest.raises(PeerError):
        decode(Segment(0, changed, (split,), (len(noise) - split,)), noise, 2**21)


@settings(max_examples=80)
@given(st.integers(0, len(GAPS + DIFFERENCES) - 1), st.integers(1, 255))
def test_an_altered_byte_is_refused_or_means_other_changes(place: int, change: int) -> None:
    altered = bytearray(GAPS + DIFFERENCES)
    altered[place] ^= change
    try:
        positions, differences = decode(GOOD, bytes(altered))
    except PeerError:
        return
    assert len(positions) == len(differences) == 3
    assert 0 <= positions[0] < positions[1] < positions[2] < 11
    assert differences.all()
