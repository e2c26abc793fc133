"""Which files of ``blobs/`` go, and when."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from node.log import blob_retention
from node.log.blob_retention import BlobUses, clear, uses
from node.store.blob_store import BlobStore
from protocol.log.entry import Entry
from protocol.records import Rollout, Step, Weights
from tests.node.fake_children import Faults
from tests.node.fakes import open_cluster
from tests.protocol.builders import MODEL, Story, digest

LEVEL = 2  # the small domain's
OLD = 1000.0
SERVICE = "clearing out files"


def file_of(rollout: Entry) -> bytes:
    assert isinstance(rollout.payload, Rollout)
    return rollout.payload.submission


def train(story: Story, number: int) -> tuple[bytes, bytes]:
    """The next version, ``number``; returns its step blob and its manifest."""
    base = story.newest
    blob = digest(f"step blob {number}")
    step = Step(1, number, base.id, blob, 90, 500_000, 0, 0, 2, 8, 0, 8, 40, 9, 1, 1, 0)
    made = story.say("trainer", step)
    story.newest = story.say("trainer", story.version(1, number, base.id, made.id))
    assert isinstance(story.newest.payload, Weights)
    return blob, story.newest.payload.manifest


def test_what_the_genesis_names_is_always_needed() -> None:
    story = Story()
    named = {MODEL.manifest.hash, MODEL.config.hash, MODEL.tokenizer.hash}
    for number in range(1, 12):
        assert uses(story.ledger).needed >= named
        train(story, number)


def test_a_submission_goes_once_it_is_decided_and_its_version_is_past_use() -> None:
    story = Story()
    accepted, refused, open_ = (story.rollout("i1"), story.rollout("i1", 2), story.rollout("i2"))
    files = [file_of(rollout) for rollout in (accepted, refused, open_)]
    assert uses(story.ledger).needed >= {*files}
    story.judge("v1", accepted)
    story.judge("v1", refused, "hard")
    for number in range(1, 8):
        known = uses(story.ledger)
        newest = number - 1
        # What was refused, and what is too old to be trained with, is kept for verdicts to be replayed.
        if newest < 5:
            assert files[2] in known.needed
            assert (files[0] in known.needed) == (newest <= LEVEL)
            assert known.spare == ((files[1],) if newest <= LEVEL else (files[1], files[0]))
            assert not known.over
        else:
            assert not known.needed & {*files}
            assert known.spare == ()
            assert known.over == {*files}
        train(story, number)


def test_the_oldest_go_first_and_refused_ones_before() -> None:
    story = Story()
    files: dict[str, bytes] = {}
    for number in range(5):
        for outcome in ("accepted", "hard"):
            rollout = story.rollout("i1" if outcome == "accepted" else "i2")
            story.judge("v1", rollout, outcome)
            files[f"{outcome} {number}"] = file_of(rollout)
        if number < 4:
            train(story, number + 1)
    names = {file: name for name, file in files.items()}
    order = [names[file] for file in uses(story.ledger).spare]
    assert order == [*(f"hard {number}" for number in range(5)), "accepted 0", "accepted 1"]


def test_steps_and_manifests_go_with_their_versions() -> None:
    story = Story()
    made = [train(story, number) for number in range(1, 12)]
    needed = uses(story.ledger).needed
    assert [blob in needed for blob, _ in made] == [False] * 6 + [True] * 5
    assert [manifest in needed for _, manifest in made] == [False] * 6 + [True] * 5


def test_a_liar_that_announces_anothers_file_takes_it_from_nobody() -> None:
    story = Story()
    honest = story.rollout("i1")
    story.judge("v1", honest)
    assert isinstance(honest.payload, Rollout)
    for counter, file in enumerate([file_of(honest), MODEL.config.hash]):
        lie = replace(honest.payload, first_counter=2 * counter, submission=file)
        story.judge("v1", story.say("i2", lie), "hard")
    known = uses(story.ledger)
    assert known.needed >= {file_of(honest), MODEL.config.hash}
    assert not known.spare
    assert not known.over


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def put(blobs: BlobStore, *texts: str) -> list[bytes]:
    """Files that are old."""
    made = [blobs.put(text.encode()) for text in texts]
    for one in made:
        os.utime(blobs.path(one), (OLD, OLD))
    return made


def test_unknown_files_go_when_they_are_old(blobs: BlobStore) -> None:
    needed, spare, over, old, young = put(blobs, "needed", "spare", "over", "old", "young")
    os.utime(blobs.path(young), (2 * OLD, 2 * OLD))
    os.utime(blobs.path(over), (2 * OLD, 2 * OLD))
    known = BlobUses({needed}, (spare, digest("not here")), {over, digest("nor this")})
    left = clear(blobs, known, before=OLD + 1, quota=0)
    assert {*blobs.held()} == {needed, spare, young}
    assert left == len("needed") + len("spare") + len("young")
    assert not blobs.has(old)


def test_the_quota_takes_what_is_spare_and_no_more(blobs: BlobStore) -> None:
    needed, first, second, third = put(blobs, "needed".ljust(100), *(f"{n}".ljust(100) for n in range(3)))
    known = BlobUses({needed}, (first, second, third), frozenset())
    assert clear(blobs, known, before=0, quota=400) == 400
    assert clear(blobs, known, before=0, quota=250) == 200
    assert {*blobs.held()} == {needed, third}
    assert clear(blobs, known, before=0, quota=1) == 100
    assert {*blobs.held()} == {needed}


class Failing(BlobStore):
    """A store on a disk that does not let go of one file."""

    stuck = b""

    def delete(self, digest: bytes, *, before: float | None = None) -> bool:
        if digest == self.stuck:
            raise OSError(30, "Read-only file system")
        return super().delete(digest, before=before)


def test_a_file_that_cannot_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    blobs = Failing(tmp_path / "blobs")
    files = put(blobs, *(f"file {number}" for number in range(5)))
    blobs.stuck = files[2]
    with pytest.raises(OSError, match="Read-only"):
        clear(blobs, BlobUses(frozenset(), (), frozenset()), before=2 * OLD, quota=0)
    assert list(blobs.held()) == [files[2]]


async def test_a_node_clears_its_folder_and_says_where_it_cannot(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("a")
        named = {*running.blobs.held()}
        (old,) = put(running.blobs, "old")
        young = running.blobs.put(b"young")
        blobs = Failing(running.blobs.folder)
        blobs.stuck = old
        running.nursery.start_soon(blob_retention.keep_clear, running.node, blobs)
        with trio.fail_after(5000):
            while "blobs" not in running.warnings:  # noqa: ASYNC110  warnings have no event
                await trio.sleep(1)
        assert running.warnings["blobs"].startswith("files that nothing needs are not removed: ")
        running.keep(SERVICE)
        with trio.fail_after(5000):
            while running.blobs.has(old) or running.warnings:  # noqa: ASYNC110  nor have files
                await trio.sleep(1)
        assert {*running.blobs.held()} == {*named, young}


async def test_the_owner_is_told_where_the_quota_does_not_suffice(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("a")
        running.blobs.put(bytes(3 << 20))
        config = replace(running.node.config, blobs=replace(running.node.config.blobs, quota=2))
        running.nursery.start_soon(blob_retention.keep_clear, replace(running.node, config=config), running.blobs)
        with trio.fail_after(5000):
            while "blobs" not in running.warnings:  # noqa: ASYNC110  warnings have no event
                await trio.sleep(1)
        assert "3 MiB, more than blobs.quota allows (2 MiB)" in running.warnings["blobs"]
