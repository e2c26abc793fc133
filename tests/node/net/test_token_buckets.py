"""Token buckets."""

from __future__ import annotations

from node.net.token_buckets import Buckets


def test_buckets_refill_and_stay_bounded() -> None:
    buckets = Buckets(burst=4, per_second=2, most=100)
    assert [buckets.take(b"a", 1, 0.0) for _ in range(5)] == [True] * 4 + [False]
    assert buckets.take(b"b", 4, 0.0)
    assert not buckets.take(b"a", 3, 1.0)
    assert buckets.take(b"a", 3, 1.5)
    for number in range(200):
        buckets.take(number.to_bytes(2, "big"), 1, 2.0)
    assert len(buckets) == 100


def test_a_filled_bucket_is_full() -> None:
    buckets = Buckets(burst=1, per_second=0.1)
    assert [buckets.take("a", 1, 0.0), buckets.take("a", 1, 0.0)] == [True, False]
    buckets.fill("a")
    assert buckets.take("a", 1, 0.0)
