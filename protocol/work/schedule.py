"""Who has to do what, from hashes alone: prompts, audits, and how old a rollout may be.

1. The seed of a prompt is SHA-256(``"farflung/seed/v1\\0"`` ‖ domain ‖ weights entry id ‖ node ‖ u64 counter):
   a node cannot choose its prompts, and everybody can recompute them. Hashed integers are big-endian.
2. The prompt is a task, drawn by the weights of the genesis, and an item of it, both from
   SHA-256(``"farflung/task/v1\\0"`` ‖ seed), which is not the noise's hash.
3. The groups that a validator replays follow from SHA-256 of its signature over the submission's hash and the id of
   the entry that announces it (context ``identity.DRAW``): the author cannot foresee them, and anyone can check them.
   Without the entry, whoever announces another's file first would learn the draw of it. The groups of lowest
   SHA-256(``"farflung/audit/v1\\0"`` ‖ that hash ‖ u32 group) are taken, the share rounded up, at least one.
   The share is ``AUDIT_FACTOR`` times what its author's trust lacks to a million, rounded up to 1, ½, ¼ … (its *tier*),
   and at least the policy's ``audit_share``; trust is that of the cut that the version anchors on. So a newcomer is
   audited fully, and who had 78 submissions accepted in a row by an eighth.
4. Due are the ``MAX_DUE_VALIDATORS`` validators of lowest SHA-256(weights ‖ author ‖ u64 first counter ‖ validator),
   the author not among them: nobody judges its own work.
5. The policy lag is the number of the version a step starts from minus that of the version which generated.
   A rollout counts while its lag is from 0 to ``async_level``; a negative one was generated with weights
   that the step does not follow from.
6. Where the recipe has target lengths, SHA-256(``"farflung/length/v1\\0"`` ‖ seed) draws one of them: its first eight
   bytes modulo their number. The prompt is then the question, a line feed, and the recipe's budget prompt with the
   target in the place of its ``{}``.
7. Evaluations ask what training cannot ask: the seed of a task's question ``number`` is
   SHA-256(``"farflung/eval/v1\0"`` ‖ domain ‖ SHA-256(task) ‖ u64 number), where the task stands as the canonical
   encoding of its kind, name, parameters, version and its data's hash or nil. Its item is drawn as rule 2 says. Neither
   version nor node has a part in it: everybody asks every version the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

from protocol import codec
from protocol.constants import MAX_DUE_VALIDATORS, MILLION
from protocol.domain import Recipe, Task
from protocol.errors import LocalError

SEED_CONTEXT: Final = b"farflung/seed/v1\0"
TASK_CONTEXT: Final = b"farflung/task/v1\0"
LENGTH_CONTEXT: Final = b"farflung/length/v1\0"
EVAL_CONTEXT: Final = b"farflung/eval/v1\0"
AUDIT_CONTEXT: Final = b"farflung/audit/v1\0"
AUDIT_FACTOR: Final = 10
"""Where trust lacks a tenth, everything is audited. A change alters who replays what."""
MAX_TIER: Final = 10
"""The smallest share is 2⁻¹⁰."""


def seed(domain: bytes, weights: bytes, node: bytes, counter: int) -> bytes:
    """The 32-byte seed of the prompt that ``node`` answers at ``counter`` with the version ``weights``."""
    _ids(domain, weights, node)
    return sha256(SEED_CONTEXT + domain + weights + node + counter.to_bytes(8, "big")).digest()


def eval_seed(domain: bytes, task: Task, number: int) -> bytes:
    """The 32-byte seed of question ``number`` with which versions are evaluated on ``task``; rule 7."""
    _ids(domain)
    data = None if task.data is None else task.data.hash
    described = codec.encode([task.kind, task.name, task.parameters, task.version, data])
    return sha256(EVAL_CONTEXT + domain + sha256(described).digest() + number.to_bytes(8, "big")).digest()


def eval_item(eval_seed: bytes) -> int:
    """The item that an evaluation's seed draws from its task, below 2³¹."""
    return choose_task(eval_seed, (1,))[1]


def choose_task(prompt_seed: bytes, weights: Sequence[int]) -> tuple[int, int]:
    """``(task index, item)`` of a seed; ``weights`` are the tasks' shares, and the item is below 2³¹."""
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise LocalError("a domain's tasks need positive weights")
    digest = sha256(TASK_CONTEXT + prompt_seed).digest()
    ticket = int.from_bytes(digest[:16], "big") % total
    item = int.from_bytes(digest[16:20], "big") >> 1
    for index, weight in enumerate(weights):
        if ticket < weight:
            return index, item
        ticket -= weight
    raise LocalError("the weights of the tasks do not add up")


def target_length(prompt_seed: bytes, targets: Sequence[int]) -> int | None:
    """How many tokens the responses to a seed's prompt are to have; None where there are no ``targets``."""
    if not targets:
        return None
    draw = int.from_bytes(sha256(LENGTH_CONTEXT + prompt_seed).digest()[:8], "big")
    return targets[draw % len(targets)]


def prompt(question: str, prompt_seed: bytes, recipe: Recipe) -> str:
    """The prompt of a seed whose task asks ``question``: with length control, it says the budget."""
    target = target_length(prompt_seed, recipe.target_lengths)
    return question if target is None else f"{question}\n{recipe.budget_prompt.replace('{}', str(target))}"


def draw_message(submission: bytes, rollout: bytes) -> bytes:
    """What a validator's draw signs: the hash of the file, and the id of the entry that announces it."""
    _ids(submission, rollout)
    return submission + rollout


def audited_groups(draw: bytes, groups: int, share: int) -> tuple[int, ...]:
    """The ascending indices of the ``groups`` groups that the owner of the signature ``draw`` replays.

    ``share`` is in micro, 0 to 1,000,000.
    """
    count = audited_count(groups, share)
    lot = AUDIT_CONTEXT + sha256(draw).digest()
    ranked = sorted(range(groups), key=lambda index: sha256(lot + index.to_bytes(4, "big")).digest())
    return tuple(sorted(ranked[:count]))


def audited_count(groups: int, share: int) -> int:
    """How many of ``groups`` groups an audit of ``share`` (micro) replays."""
    if groups < 1 or not 0 <= share <= MILLION:
        raise LocalError(f"cannot audit a share of {share} of {groups} groups")
    return max(1, -(-groups * share // MILLION))


def audit_tier(trust: int) -> int:
    """The tier of an author with ``trust`` (micro): the largest t up to ``MAX_TIER`` whose share 2⁻ᵗ is enough."""
    wanted = min(MILLION, AUDIT_FACTOR * (MILLION - trust))
    tier = 0
    while tier < MAX_TIER and MILLION >> (tier + 1) >= wanted:
        tier += 1
    return tier


def audit_share(tier: int, least: int) -> int:
    """The share (micro) of a submission's groups to replay; ``least`` is the policy's."""
    return max(least, MILLION >> tier)


def due_validators(weights: bytes, author: bytes, first_counter: int, validators: Iterable[bytes]) -> tuple[bytes, ...]:
    """The validators that are to audit a submission, the lowest rank first."""
    prefix = weights + author + first_counter.to_bytes(8, "big")
    ranked = sorted(set(validators) - {author}, key=lambda validator: sha256(prefix + validator).digest())
    return tuple(ranked[:MAX_DUE_VALIDATORS])


def usable(policy_lag: int, async_level: int) -> bool:
    """Whether a rollout of this lag still counts."""
    return 0 <= policy_lag <= async_level


def _ids(*ids: bytes) -> None:
    if any(len(value) != 32 for value in ids):
        raise LocalError("ids and keys have 32 bytes")
