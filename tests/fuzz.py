"""A fuzzer of everything that reads what others send: ``python -m tests.fuzz --minutes 10 [--seed N]``.

Valid objects are mutated (bits, lengths, blocks, other objects' parts, msgpack values) and read again. A parser refuses
with ``PeerError`` and nothing else, whatever it is given; what it takes must write the same bytes again. What is left
of a submission then goes through the checks before replay, and its proofs through the verifier.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgpack
import numpy as np

from node.api.reason_words import words
from proofs import activation, audit, duplicates
from protocol.domain import parse_genesis
from protocol.errors import PeerError
from protocol.weights.manifest import Manifest
from protocol.work.presence import Presence
from protocol.work.rollout import FINISH_END, Group, Response, Submission
from tests.protocol.builders import RECIPE, digest, key, small_genesis
from tests.test_wire_forms import world

Reader = Callable[[bytes], bytes | None]
"""Reads and writes again; None where there is nothing to compare."""

HIDDEN: Final = 64
STATES: Final = np.random.default_rng(1).standard_normal((40, HIDDEN), dtype=np.float32)


def submission() -> Submission:
    """A valid one."""
    response = Response((5, 6, 0), (100, 200, 0), 500_000, FINISH_END)
    groups = tuple(
        Group(4 + index, (1, 2), (response,) * RECIPE.group_size, activation.build(STATES[: 3 * RECIPE.group_size]))
        for index in range(RECIPE.groups_per_submission)
    )
    return Submission(digest("domain"), digest("weights"), digest("author"), 4, groups)


def _submission(data: bytes) -> bytes:
    parsed = Submission.parse(data, RECIPE)
    found = audit.inspect(parsed, {0: (1, 2)}, RECIPE, 0, 40)
    assert words(found.reason)
    duplicates.Index().take(parsed, digest("entry"))
    return parsed.encode()


def _proofs(data: bytes) -> None:
    activation.verify(STATES, data)


def targets() -> dict[str, tuple[bytes, Reader]]:
    """Valid bytes of each kind of object, and its reader."""
    found: dict[str, tuple[bytes, Reader]] = {name: (data, read) for name, (data, read) in world().items()}
    node = key("node")
    presence = Presence(
        domain=digest("domain"),
        node=node.node,
        boot=1,
        counter=2,
        name="name",
        role="relay",
        willing=("relay",),
        addresses=("/ip4/1.2.3.4/tcp/5",),
        bulk=(),
        versions=(digest("v"),),
        arriving=(),
        cpus=1,
        memory_mb=2,
        gpu_mb=3,
        tokens_per_second=4,
        bandwidth_kbps=5,
        load=6,
        paused=0,
    )
    manifest = Manifest.of_file([("w", "F32", [4, 4])], bytes(64), 1)
    found["submission"] = (submission().encode(), _submission)
    found["activation proofs"] = (activation.build(STATES), _proofs)
    found["genesis"] = (small_genesis(), _genesis)
    found["manifest"] = (manifest.encode(), lambda data: Manifest.parse(data).encode())
    found["presence"] = (presence.sign(node), _presence)
    return found


def _genesis(data: bytes) -> None:
    parse_genesis(data)


def _presence(data: bytes) -> None:
    Presence.parse(data)


def mutated(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """``data`` with one to four changes."""
    out = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        place = generator.randrange(len(out) + 1)
        size = generator.choice((1, 1, 2, 4, 8, 32, 100))
        match generator.randrange(9):
            case 0 if out:
                out[place % len(out)] ^= 1 << generator.randrange(8)
            case 1 if out:
                out[place % len(out)] = generator.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC4, 0xD9, 0xDC, 0xDD, 0xCF, 0xFF))
            case 2:
                del out[place : place + size]
            case 3:
                out[place:place] = generator.randbytes(size)
            case 4:
                out[place:place] = out[max(0, place - size) : place]
            case 5:
                other = generator.choice(others)
                start = generator.randrange(len(other) + 1)
                out[place : place + size] = other[start : start + size]
            case 6:
                del out[place:]
            case 7:
                out[place : place + size] = msgpack.packb(_value(generator, 3), use_bin_type=True)
            case _:
                out[place : place + 4] = generator.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1)).to_bytes(4, "big")
    return bytes(out)


def _value(generator: random.Random, depth: int) -> object:
    match generator.randrange(8 if depth else 6):
        case 0:
            return generator.choice((0, 1, 127, 128, 2**32, 2**63 - 1, 2**64 - 1, -1))
        case 1:
            return generator.randbytes(generator.choice((0, 1, 31, 32, 33, 64)))
        case 2:
            return generator.choice(("", "join", "é", "a" * 70, "\0"))
        case 3:
            return None
        case 4:
            return generator.choice((True, 1.5, float("nan")))
        case 5:
            return generator.getrandbits(generator.choice((7, 8, 16, 32, 63)))
        case 6:
            return [_value(generator, depth - 1) for _ in range(generator.randrange(4))]
        case _:
            return {"a": _value(generator, depth - 1)}


def fuzz(
    seconds: float, seed: int, most: int | None = None, chosen: dict[str, tuple[bytes, Reader]] | None = None
) -> Counter[str]:
    """Fuzz for so long (or ``most`` inputs); how many inputs of each kind were refused ("kind −") and taken ("kind +").

    Raises what a parser raises besides ``PeerError``, with the input in a note.
    """
    generator = random.Random(seed)
    chosen = chosen or targets()
    names = sorted(chosen)
    everything = [data for data, _ in chosen.values()]
    counts: Counter[str] = Counter()
    kept = {name: [chosen[name][0]] for name in names}
    until = time.monotonic() + seconds
    while time.monotonic() < until and (most is None or counts.total() < most):
        name = names[counts.total() % len(names)]
        data = mutated(generator.choice(kept[name]), generator, everything)
        try:
            again = chosen[name][1](data)
            assert again is None or again == data, "what was taken does not write the same bytes"
        except PeerError:
            counts[f"{name} −"] += 1
        except BaseException as error:
            error.add_note(f"{name}: {data.hex()}")
            raise
        else:
            counts[f"{name} +"] += 1
            if len(kept[name]) < 200 and data not in kept[name]:
                kept[name].append(data)  # what still parses gets further
    return counts


def main() -> int:
    """Fuzz and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    counts = fuzz(60 * arguments.minutes, arguments.seed)
    for name, count in sorted(counts.items()):
        print(f"{count:9} {name}")
    print(f"{counts.total():9} inputs, nothing but PeerError")
    return 0


if __name__ == "__main__":
    sys.exit(main())
