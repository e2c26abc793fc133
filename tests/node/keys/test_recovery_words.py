"""Recovery keys as words: there and back, and what a slip of the pen does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import UserError
from node.keys import recovery_words
from protocol.identity import Identity

KEY = Identity(bytes(range(32)))
WORDS = recovery_words.words(KEY).split()


@settings(max_examples=30)
@given(st.binary(min_size=32, max_size=32))
def test_a_key_comes_back_from_its_words(seed: bytes) -> None:
    words = recovery_words.words(Identity(seed))
    assert len(words.split()) == recovery_words.WORDS
    assert recovery_words.key(words).seed == seed


def test_the_words_are_those_of_bip_39() -> None:
    """Vectors of https://github.com/trezor/python-mnemonic, vectors.json."""
    assert recovery_words.words(Identity(bytes(32))) == "abandon " * 23 + "art"
    assert recovery_words.words(Identity(b"\x7f" * 32)) == (
        "legal winner thank year wave sausage worth useful legal winner thank year wave sausage worth useful "
        "legal winner thank year wave sausage worth title"
    )
    assert recovery_words.words(Identity(b"\xff" * 32)) == "zoo " * 23 + "vote"


def test_what_is_shown_can_be_typed_in_again() -> None:
    lines = recovery_words.lines(KEY)
    assert len(lines) == 6
    shown = " ".join(lines).split()
    # The table runs down its columns; a user who follows the numbers types the words in order.
    numbered = dict(zip(map(int, shown[::2]), shown[1::2], strict=True))
    assert [numbered[place] for place in range(1, 25)] == WORDS
    by_number = " ".join(f"{place}. {word.upper()}" for place, word in sorted(numbered.items()))
    assert recovery_words.key(by_number).seed == KEY.seed
    assert recovery_words.key("\n".join(WORDS) + "\n").seed == KEY.seed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "0 words"),
        (" ".join(WORDS[:-1]), "23 words"),
        (" ".join([*WORDS, "abandon"]), "25 words"),
        (" ".join(["farflung", *WORDS[1:]]), "word 1 is not"),
        (" ".join([WORDS[0], "qqq", *WORDS[2:-1], "ééé"]), "words 2, 24 are not"),
        (" ".join([WORDS[1], WORDS[0], *WORDS[2:]]), "do not belong together"),
        (" ".join(["zoo", *WORDS[1:]]), "do not belong together"),
    ],
)
def test_a_slip_is_told_without_the_words(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        recovery_words.key(text)
    assert said in str(caught.value)
    assert not set(text.split()) & set(str(caught.value).replace(",", "").split()) - {"words"}


def test_a_file_with_words(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_text("\n".join(WORDS))
    assert recovery_words.key(recovery_words.read(path)).seed == KEY.seed
    for content in (b"\xff\xfe", b"a" * 5000):
        path.write_bytes(content)
        with pytest.raises(UserError):
            recovery_words.read(path)
    with pytest.raises(UserError, match="cannot be read"):
        recovery_words.read(tmp_path / "missing")
