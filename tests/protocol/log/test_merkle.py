"""RFC 9162 trees: against the definition, against proofs that were tampered with, against public vectors."""

from __future__ import annotations

import json
from base64 import b64decode
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalError, PeerError
from protocol.log.merkle import (
    EMPTY_ROOT,
    CompactRange,
    consistency_path,
    inclusion_proof,
    leaf_hash,
    root,
    root_of,
    sides,
    verify_inclusion,
    verify_path,
)
from tests.protocol.reference_log import verify_consistency
from tests.vectors import public

MOST = 20
LEAVES = [bytes([number]) for number in range(MOST)]
HASHES = [leaf_hash(leaf) for leaf in LEAVES]
ROOTS = [root(LEAVES[:size]) for size in range(MOST + 1)]


def defined(leaves: list[bytes]) -> bytes:
    """The tree head as RFC 9162 section 2.1.1 defines it, word for word."""
    if not leaves:
        return sha256().digest()
    if len(leaves) == 1:
        return sha256(b"\0" + leaves[0]).digest()
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return sha256(b"\1" + defined(leaves[:k]) + defined(leaves[k:])).digest()


def refused(*arguments: Any) -> bool:
    """Whether the verifier that fits these arguments refuses them."""
    try:
        if isinstance(arguments[0], bytes):
            verify_inclusion(*arguments)
        else:
            verify_consistency(*arguments)
    except PeerError:
        return True
    return False


@pytest.mark.parametrize("size", range(MOST + 1))
def test_roots_follow_the_definition(size: int) -> None:
    grown = CompactRange()
    for leaf in LEAVES[:size]:
        grown = grown.append(leaf)
    assert grown.root == root(LEAVES[:size]) == defined(LEAVES[:size])
    assert grown.size == size
    assert len(grown.nodes) == size.bit_count()


def test_known_roots() -> None:
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert root([b""]).hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"


def test_every_leaf_has_a_proof_that_holds_for_it_alone() -> None:
    for size in range(1, MOST):
        for index in range(size):
            proof = inclusion_proof(LEAVES[:size], index)
            verify_inclusion(leaf_hash(LEAVES[index]), index, size, proof, ROOTS[size])
            assert refused(leaf_hash(b"another"), index, size, proof, ROOTS[size])
            assert refused(leaf_hash(LEAVES[index]), index, size, proof, ROOTS[size + 1])
            assert refused(leaf_hash(LEAVES[index]), (index + 1) % (size + 1), size, proof, ROOTS[size])
            assert refused(leaf_hash(LEAVES[index]), index, size, [*proof, EMPTY_ROOT], ROOTS[size])
            if proof:
                assert refused(leaf_hash(LEAVES[index]), index, size, proof[:-1], ROOTS[size])


def test_hashes_of_leaves_are_enough_for_a_root() -> None:
    for size in range(1, MOST):
        assert root_of(HASHES[:size]) == ROOTS[size]


def test_a_path_fits_one_shape_alone() -> None:
    for size in range(1, MOST):
        for index in range(size):
            proof = inclusion_proof(LEAVES[:size], index)
            leaf = leaf_hash(LEAVES[index])
            for guess in range(1 << len(proof)):
                if guess == sides(index, size):
                    verify_path(leaf, guess, proof, ROOTS[size])
                else:
                    with pytest.raises(PeerError, match="another root"):
                        verify_path(leaf, guess, proof, ROOTS[size])
            for wrong in (-1, 1 << len(proof)):
                with pytest.raises(PeerError, match="sides"):
                    verify_path(leaf, wrong, proof, ROOTS[size])
            with pytest.raises(PeerError):
                verify_path(leaf, sides(index, size), [*proof, EMPTY_ROOT], ROOTS[size])


def test_every_prefix_has_a_proof_that_holds_for_it_alone() -> None:
    for size2 in range(1, MOST):
        for size1 in range(1, size2 + 1):
            proof = consistency_path(HASHES[:size2], size1)
            verify_consistency(size1, size2, proof, ROOTS[size1], ROOTS[size2])
            assert refused(size1, size2, proof, ROOTS[size1 - 1], ROOTS[size2])
            assert refused(size1, size2, proof, ROOTS[size1], ROOTS[size2 + 1])
            assert refused(size1, size2, [*proof, EMPTY_ROOT], ROOTS[size1], ROOTS[size2])
            if proof:
                assert refused(size1, size2, proof[:-1], ROOTS[size1], ROOTS[size2])


@given(st.integers(1, MOST), st.data())
def test_a_flipped_byte_breaks_a_proof(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    proof = inclusion_proof(LEAVES[:size], index)
    if not proof:
        return
    place = data.draw(st.integers(0, len(proof) - 1))
    node = bytearray(proof[place])
    node[data.draw(st.integers(0, 31))] ^= data.draw(st.integers(1, 255))
    proof[place] = bytes(node)
    assert refused(leaf_hash(LEAVES[index]), index, size, proof, ROOTS[size])


def test_no_proof_starts_from_nothing() -> None:
    assert refused(0, 0, [], EMPTY_ROOT, EMPTY_ROOT)
    assert refused(0, 3, [], EMPTY_ROOT, ROOTS[3])
    assert refused(3, 2, [], ROOTS[3], ROOTS[2])
    assert refused(leaf_hash(b""), 0, 0, [], EMPTY_ROOT)
    assert refused(leaf_hash(b""), -1, 1, [], root([b""]))


def test_hashes_of_another_length_are_refused() -> None:
    proof = inclusion_proof(LEAVES[:4], 1)
    assert refused(leaf_hash(LEAVES[1]), 1, 4, [proof[0][:-1], proof[1]], ROOTS[4])
    assert refused(b"", 0, 1, [], b"")


@pytest.mark.parametrize(("size", "index"), [(0, 0), (3, 3), (3, -1)])
def test_there_is_no_proof_for_a_missing_leaf(size: int, index: int) -> None:
    with pytest.raises(LocalError):
        inclusion_proof(LEAVES[:size], index)


@pytest.mark.parametrize("size", [0, 4, -1])
def test_there_is_no_proof_for_a_missing_prefix(size: int) -> None:
    with pytest.raises(LocalError):
        consistency_path(HASHES[:3], size)


def test_public_vectors() -> None:
    def raw(text: str | None) -> bytes:
        return b64decode(text or "")

    files = sorted(public("merkle").glob("**/*.json"))
    assert len(files) == 196
    accepted = 0
    for file in files:
        case = json.loads(file.read_bytes())
        proof = [raw(node) for node in case["proof"] or []]
        if "leafIdx" in case:
            wrong = refused(raw(case["leafHash"]), case["leafIdx"], case["treeSize"], proof, raw(case["root"]))
        else:
            wrong = refused(case["size1"], case["size2"], proof, raw(case["root1"]), raw(case["root2"]))
        assert wrong == case["wantErr"], file
        accepted += not wrong
    assert accepted == 12
