"""Task sets in text files."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.errors import UserError
from node.tasks import task_sets
from protocol.taskset import MAX_ITEM


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "set.txt"
    file.write_text(task_sets.text([5, 0, MAX_ITEM], ["made by hand", "yesterday"]))
    assert file.read_text().splitlines()[:3] == ["# made by hand", "# yesterday", "0"]
    assert task_sets.read(file).items == (0, 5, MAX_ITEM)


def test_lines_may_be_in_any_order_and_commented(tmp_path: Path) -> None:
    file = tmp_path / "set.txt"
    file.write_text("\n 12  # a hard one\n#3\n4")
    assert task_sets.read(file).items == (4, 12)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"1\ntwo\n", "line 2 of the task set .* is not the number of an item: 'two'"),
        (b"1_0\n", "not the number of an item"),
        (b"-1\n", "not the number of an item"),
        (b"2147483648\n", "not the number of an item.* to 2147483647"),
        ("٣\n".encode(), "not the number of an item"),
        (b"9" * 5000, "not the number of an item"),
        (b"7\n8\n7\n", "names item 7 in lines 1 and 3; name it once"),
        (b"# nothing\n\n", "names no item"),
        (b"\xff\n", "is not text"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "set.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        task_sets.read(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the task set .* No such file"):
        task_sets.read(tmp_path / "nothing.txt")
