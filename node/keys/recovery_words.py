"""A recovery key as 24 English words (BIP 39: 256 bits and a checksum of 8), for paper and for typing in again."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Final

from mnemonic import Mnemonic

from node.errors import UserError
from node.store.durable_files import read_text
from protocol.identity import Identity

WORDS: Final = 24
PURPOSE: Final = (
    "Whoever has these words can close this node if its key is stolen, and move its credit to a new node if its "
    "machine is lost. Write them on paper, and keep it away from this machine and from others' eyes."
)
MAX_FILE_BYTES: Final = 4096


def words(key: Identity) -> str:
    """The words of a recovery key, with spaces between them."""
    return str(Mnemonic("english").to_mnemonic(key.seed))


def lines(key: Identity) -> list[str]:
    """The words as a numbered table of six lines, for people."""
    numbered = [f"{number:>2} {word}" for number, word in enumerate(words(key).split(), 1)]
    return ["  " + "".join(f"{item:<13}" for item in numbered[row::6]).rstrip() for row in range(6)]


def key(text: str) -> Identity:
    """The recovery key that was written as these words; numbers between them and upper case do no harm.

    Raises ``UserError`` that tells what is wrong and never repeats a word.
    """
    typed = [item for item in unicodedata.normalize("NFKD", text).lower().split() if not item.strip(".:").isdigit()]
    if len(typed) != WORDS:
        raise UserError(f"these are {len(typed)} words, and a recovery key has {WORDS}", "type all of them, in order")
    known = Mnemonic("english")
    list_of_words = frozenset(known.wordlist)
    wrong = [str(place) for place, word in enumerate(typed, 1) if word not in list_of_words]
    if wrong:
        which = f"word {wrong[0]} is" if len(wrong) == 1 else f"words {', '.join(wrong)} are"
        raise UserError(f"{which} not in the list of recovery words", "look for a slip of the pen")
    try:
        return Identity(bytes(known.to_entropy(typed)))
    except ValueError:
        raise UserError("the words do not belong together: one is wrong or two are swapped", "compare them") from None


def read(path: Path) -> str:
    """What a file with words holds. Raises ``UserError``."""
    text = read_text(path, "name the file that holds the words", most=MAX_FILE_BYTES)
    if len(text) > MAX_FILE_BYTES:
        raise UserError(f"{path}: this is no list of {WORDS} words", "name the file that holds them")
    return text
