"""Signed notes: the specification's example both ways, and everything that is no note."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import LocalError, PeerError
from protocol.log.signed_note import COSIGNATURE, MAX_SIGNATURES, Note, Signature, VerifierKey
from tests.protocol.builders import key
from tests.protocol.reference_log import ED25519, parse_verifier_key
from tests.protocol.reference_log import verify_note as verify
from tests.vectors import public

TEXT = "Nur ein Text,\n\nmit Leerzeile – und é.\n"
KEY = VerifierKey("example.com/a", ED25519, key("a").node)


def signed(*names: str, text: str = TEXT) -> Note:
    """A note signed by the keys of these names."""
    lines = []
    for name in names:
        verifier = VerifierKey(f"example.com/{name}", ED25519, key(name).node)
        lines.append(Signature(verifier.name, verifier.id, key(name).sign(b"", text.encode())))
    return Note(text, tuple(lines))


def read(data: bytes) -> Note:
    """Through the parser."""
    return Note.parse(data, max_bytes=1 << 20)


def test_the_specifications_example_is_verified_and_written_alike() -> None:
    example = json.loads(public("c2sp", "examples.json").read_bytes())["signed_note"]
    verifier = parse_verifier_key(example["vkey"])
    assert verifier.encode() == example["vkey"]
    data = example["note"].encode()
    note = read(data)
    assert note.encode() == data
    assert verify(note, [verifier]) == [verifier]
    assert verify(note, [KEY, verifier]) == [verifier]
    for place in range(len(data)):
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(PeerError):
            verify(read(flipped), [verifier])


def test_our_notes_are_what_the_specification_says() -> None:
    """Written and checked here word for word, with nothing of ours."""
    note = signed("a")
    text, line = TEXT.encode(), note.encode()[len(TEXT.encode()) :].decode()
    dash, name, payload = line[1:-1].split(" ")
    assert (line[0], dash, name, line[-1]) == ("\n", "—", "example.com/a", "\n")
    raw = b64decode(payload)
    assert raw[:4] == sha256(b"example.com/a\n\x01" + key("a").node).digest()[:4]
    assert raw[4:] == key("a").sign(b"", text)
    public_key = b64encode(b"\x01" + key("a").node).decode()
    assert KEY.encode() == f"example.com/a+{raw[:4].hex()}+{public_key}"


def test_known_keys_must_hold_and_unknown_ones_are_ignored() -> None:
    both = read(signed("a", "b").encode())
    assert verify(both, [KEY]) == [KEY]
    with pytest.raises(PeerError, match="no known key"):
        verify(read(signed("b").encode()), [KEY])
    wrong = Note(TEXT, (Signature(KEY.name, KEY.id, bytes(64)), *both.signatures))
    with pytest.raises(PeerError, match="signature is wrong"):
        verify(read(wrong.encode()), [KEY])
    # The same name or the same id alone is another key.
    for other in (Signature("example.com/b", KEY.id, bytes(64)), Signature(KEY.name, bytes(4), bytes(64))):
        assert verify(read(Note(TEXT, (other, *both.signatures)).encode()), [KEY]) == [KEY]
    with pytest.raises(LocalError):
        verify(both, [VerifierKey("a", COSIGNATURE, key("a").node)])


LINE = "— a " + b64encode(bytes(68)).decode() + "\n"


@pytest.mark.parametrize(
    "data",
    [
        "",
        "\n",
        "text\n",
        "text\n\n",
        "text\n" + LINE,
        "text\n\n" + LINE[:-1],
        "text\n\n" + LINE + "\n",
        "text\n\n" + LINE + "more\n",
        "te\txt\n\n" + LINE,
        "text\r\n\n" + LINE,
        "te\0xt\n\n" + LINE,
        "text\n\n-" + LINE[1:],
        "text\n\n" + LINE.replace("— a", "—  "),
        "text\n\n" + LINE.replace("— a", "— a+b"),
        "text\n\n" + LINE.replace("— a", "— a b"),
        "text\n\n" + LINE.replace("— a", "— a\u2003b"),
        "text\n\n" + LINE.replace("— a", "—a"),
        "text\n\n" + LINE.replace("=\n", "==\n"),
        "text\n\n— a AAAAAA==\n",  # a key id and no signature
        "text\n\n— a AAAAAAB=\n",  # bits behind the end
        "text\n\n— a AAAAAAA\n",  # no padding
        "text\n\n— a AAAA_AAA\n",
        "text\n\n" + LINE * (MAX_SIGNATURES + 1),
    ],
)
def test_what_is_no_note_is_refused(data: str) -> None:
    with pytest.raises(PeerError):
        read(data.encode())


def test_bounds_and_encodings() -> None:
    assert len(read(("text\n\n" + LINE * MAX_SIGNATURES).encode()).signatures) == MAX_SIGNATURES
    with pytest.raises(PeerError, match="at most"):
        Note.parse(("text\n\n" + LINE).encode(), max_bytes=50)
    with pytest.raises(PeerError, match="UTF-8"):
        read(b"\xff\n\n" + LINE.encode())


@pytest.mark.parametrize(
    "note",
    [
        Note("text", (Signature("a", bytes(4), bytes(64)),)),
        Note("text\n", ()),
        Note("a\tb\n", (Signature("a", bytes(4), bytes(64)),)),
        Note("text\n", (Signature("a b", bytes(4), bytes(64)),)),
        Note("text\n", (Signature("", bytes(4), bytes(64)),)),
        Note("text\n", (Signature("a", bytes(4), b""),)),
    ],
)
def test_no_bad_note_is_written(note: Note) -> None:
    with pytest.raises(LocalError):
        note.encode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a+b+c",
        KEY.encode().replace("+", "-"),
        KEY.encode() + "=",
        KEY.encode().replace(KEY.id.hex(), "00000000"),
        KEY.encode().replace(KEY.id.hex(), KEY.id.hex().upper()),
        "a b" + KEY.encode()[13:],
        "a+00000000+" + b64encode(bytes(32)).decode(),
    ],
)
def test_other_verifier_keys_are_refused(text: str) -> None:
    with pytest.raises(PeerError):
        parse_verifier_key(text)


lines = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), max_size=12)
names = st.text(st.characters(min_codepoint=33, exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=1).filter(
    lambda name: "+" not in name and not any(character.isspace() for character in name)
)


@settings(max_examples=60)
@given(
    st.lists(lines, min_size=1, max_size=4),
    st.lists(
        st.builds(Signature, names, st.binary(min_size=4, max_size=4), st.binary(min_size=1, max_size=70)),
        min_size=1,
        max_size=4,
    ),
)
def test_notes_read_as_written(body: list[str], signatures: list[Signature]) -> None:
    note = Note("".join(line + "\n" for line in body), tuple(signatures))
    assert read(note.encode()) == note


@given(st.binary(max_size=80) | st.text("— a\n+=A", max_size=40).map(str.encode))
def test_any_bytes_are_a_note_in_its_one_form_or_refused(data: bytes) -> None:
    try:
        note = read(data)
    except PeerError:
        return
    assert note.encode() == data
