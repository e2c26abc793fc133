"""Replaying a verdict from a node's own folder: anybody who holds the log, the submission's file and the version can.

1. The draw must be the validator's signature over the submission and its entry; nothing is replayed without.
2. Share, standing and limits are those of the cut that the version anchors on, made anew from the whole log.
3. The groups that the draw picks are replayed first. Where that does not give the verdict, all groups are: a validator
   replays others beside those of its draw where they look like another's, and an author's lie may stand in any.
4. A verdict is *confirmed* where the outcome comes out again. Some cannot be: what was missing or late is not so now.
5. A daemon may run on the folder: nothing is written to it, and the stores are opened as another's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from node.domain import pinned_files
from node.errors import UserError
from node.log.offline_proof import find_entry
from node.log.offline_verification import verify
from node.roles import auditing
from node.roles.engine_client import Engine, Setup, open_child
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from node.store.version_store import VersionStore
from node.tasks.task_service import TaskService
from node.workers.child_messages import ConfigureEngine
from node.workers.child_process import WorkerError
from proofs.audit import AuditResult
from protocol.credit.verdict_draws import check_draw
from protocol.domain import Domain
from protocol.errors import LocalError, PeerError
from protocol.log.entry import Entry
from protocol.records import Rollout, Verdict, Weights
from protocol.work.rollout import Submission
from protocol.work.schedule import audit_share, audited_groups

BEYOND_REPLAY: Final = ("missing", "late", "undecidable", "unjudged")
"""Reasons that hold for the time when the verdict was given."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it. ``drawn`` are the groups that the draw picks, of ``groups``; ``result`` is this node's, None
    where there is nothing to replay (``note`` says why); ``whole`` says that all groups were replayed for it."""

    verdict: Entry
    rollout: Entry
    drawn: tuple[int, ...]
    groups: int
    share: int
    draw_holds: bool
    result: AuditResult | None
    whole: bool
    confirmed: bool
    note: str


async def replay(directory: DataDirectory, wanted: str, *, everything: bool = False) -> Replayed:
    """Replay the verdict whose entry id begins with ``wanted``. Raises ``UserError`` for what is not here."""
    entry = find_entry(directory, wanted)
    verdict = entry.payload
    if not isinstance(verdict, Verdict):
        raise UserError(f"{wanted}: this entry is no verdict but a {entry.kind}", "farflung log show lists verdicts")
    rollout_entry = find_entry(directory, verdict.rollout.hex())
    rollout = rollout_entry.payload
    if not isinstance(rollout, Rollout):
        raise UserError(f"{wanted}: this verdict is about no submission")
    weights_entry = find_entry(directory, rollout.weights.hex())
    weights = weights_entry.payload
    if not isinstance(weights, Weights):
        raise UserError(f"{wanted}: its submission names no version")
    ledger = verify(directory, signatures=False).ledger
    domain = ledger.domain
    height = ledger.replica.height(weights_entry.anchor)
    if height is None:
        raise UserError(f"{directory.path}: the cut that the version anchors on is not here", "try another node's log")
    standing = ledger.standing_at(rollout_entry.author, height)
    share = audit_share(standing.tier, domain.policy.audit_share)
    drawn = audited_groups(verdict.draw, rollout.groups, share)
    holds = check_draw(entry, rollout)
    none = Replayed(entry, rollout_entry, drawn, rollout.groups, share, holds, None, False, False, "")
    if not holds:
        return replace(none, note="the draw is not its author's signature over the submission: the verdict is void")
    if verdict.reason in BEYOND_REPLAY:
        return replace(none, note="it says how things were when it was given, which nobody can replay")
    blobs = BlobStore(directory.blobs, owner=False)
    data = blobs.get(rollout.submission)
    if data is None:
        raise UserError(
            f"{directory.path}: the submission's file is not here",
            "its author, its validators and the trainer have it: replay in one of their folders",
        )
    versions = VersionStore(directory.versions, owner=False)
    if not versions.complete(weights.manifest):
        raise UserError(
            f"{directory.path}: version {weights.number} is not held any more", "verdicts on the newest can be replayed"
        )
    case = auditing.Case(domain, rollout_entry.author, rollout, share, standing, ledger.replica.thresholds_at(height))

    whole = everything

    def replayed(submission: Submission) -> range:
        return range(len(submission.groups) if whole else 0)

    try:
        async with _children(directory, domain, versions.paths(weights.manifest)) as (engine, tasks):
            result = await auditing.examine(case, data, verdict.draw, engine, tasks, replayed)
            if not whole and result.outcome != verdict.outcome:
                whole = True
                result = await auditing.examine(case, data, verdict.draw, engine, tasks, replayed)
    except WorkerError as error:
        raise UserError(f"it cannot be replayed here: {error}", "see farflung doctor") from None
    confirmed = (result.outcome, result.severity) == (verdict.outcome, verdict.severity)
    return Replayed(entry, rollout_entry, drawn, rollout.groups, share, True, result, whole, confirmed, "")


@asynccontextmanager
async def _children(
    directory: DataDirectory, domain: Domain, paths: tuple[Path, Path]
) -> AsyncIterator[tuple[Engine, TaskService]]:
    rows = pinned_files.task_rows(directory, domain)
    request = ConfigureEngine(
        config=str(pinned_files.path(directory, domain.model.config)),
        tokenizer=str(pinned_files.path(directory, domain.model.tokenizer)),
        recipe=domain.recipe,
    )
    async with open_child(Setup(request, "torch", directory.work), 0) as engine, TaskService(rows) as tasks:
        try:
            await engine.load(*paths)
        except (OSError, PeerError) as error:
            raise UserError(f"{paths[0]}: {error}") from None
        except LocalError:
            raise UserError(
                f"{paths[1]}: not the version's tensors", "delete it, and the node fetches it again"
            ) from None
        yield engine, tasks
