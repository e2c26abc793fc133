"""Every number that two nodes must agree on, each with what breaks if it changes.

None of these is read from the environment. A change of any of them is a change of the protocol.
"""

from __future__ import annotations

from typing import Final

PROTOCOL: Final = 2
"""First field of a genesis: the rules by which all nodes of a domain go. Older domains are refused, in one line."""

FORMAT: Final = 1
"""First field of every other signed object and file. A change makes old and new nodes refuse each other's objects."""

MILLION: Final = 1_000_000
"""Rewards, log-probabilities, shares and scores are integers in millionths. A change rescales all of them."""

MAX_DEPTH: Final = 8
"""Deepest nesting of canonical msgpack. Lower refuses valid objects, higher lets a peer build deep recursion."""

MAX_ENTRY_BYTES: Final = 4096
"""Largest entry body. Replicas with different limits would hold different feeds."""

MAX_ENTRIES_PER_ANCHOR: Final = 256
"""Entries of one author that may stand on one anchor. A rule of validity: a change splits replicas."""

MAX_CUT_BYTES: Final = 4 << 20
"""Largest encoded cut with its certificate. A smaller limit stops nodes from following many authors."""

MAX_GENESIS_BYTES: Final = 64 << 10
"""Largest signed genesis. A node with a smaller limit cannot join."""

MAX_PRESENCE_BYTES: Final = 4096
"""Largest signed presence. Larger ones are dropped, and their nodes get no role."""

MAX_MANIFEST_BYTES: Final = 32 << 20
"""Largest weight manifest: 32 bytes a MiB of weights and about 100 bytes a tensor. Bounds the model's size."""

MAX_SUBMISSION_BYTES: Final = 64 << 20
"""Largest rollout submission. An inference node above it is judged malformed."""

MAX_STEP_BLOB_BYTES: Final = 1 << 20
"""Largest blob that a ``step`` entry names. Bounds the submissions of one step."""

MAX_BLOB_BYTES: Final = 256 << 20
"""Largest other blob (model configuration, tokenizer, the questions of a JSONL task)."""

MAX_SET_BYTES: Final = 4 << 20
"""Largest task set: about a million items. A node with a smaller limit cannot ask the domain's questions."""

CHUNK_BYTES: Final = 1 << 20
"""Size of a weight chunk. Part of the hash of the whole: a change renames every version."""

DELTA_BLOCK_BYTES: Final = 4 << 20
"""Weight bytes that one block of a delta covers, whole chunks of them. A change makes deltas unreadable to others."""

PROOF_CHUNK_TOKENS: Final = 32
"""Response tokens that one activation commitment covers (TOPLOC's batch). A change breaks every proof."""

PROOF_TOPK_SMALL: Final = 32
"""Values a commitment holds where the hidden size is below ``PROOF_HIDDEN_LARGE``."""

PROOF_TOPK_LARGE: Final = 128
"""Values a commitment holds where the hidden size is at least ``PROOF_HIDDEN_LARGE`` (TOPLOC's k)."""

PROOF_HIDDEN_LARGE: Final = 512
"""Hidden size from which on ``PROOF_TOPK_LARGE`` applies."""

FIELD_PRIME: Final = 65_497
"""Modulus of the commitment's polynomials: the largest prime whose residues TOPLOC's format uses."""

MAX_DUE_VALIDATORS: Final = 3
"""Validators that are due to audit one submission. A change alters who decides."""

KEPT_VERSIONS: Final = 5
"""Newest versions that every holder keeps. Fewer, and a validator can no longer replay what still counts."""

GATHER_FACTOR: Final = 4
"""A batch is also full with so many times ``groups_per_step`` groups, however few have a signal. Inference nodes with a
lower one would stop before the trainer has enough, and the domain with them."""

VERDICT_CUTS: Final = 60
"""Cuts after which verdicts on a submission count no more. A change alters what is decided and who is credited."""

TICKET_CUTS: Final = 64
"""Cuts for which a ticket's work, an elector's word that a node is gone and the like stay fresh. A change makes nodes
refuse each other's cuts."""

MAX_ADMISSIONS: Final = 256
"""Keys that one cut admits at most, whatever the genesis says: bounds a cut's body."""

FULL_CUTS: Final = 8
"""Cuts in a row that admit as many as they may before the least work doubles, and others before it is halved."""

BUDGET_PER_SUBMISSION: Final = 8
"""Entries that an accepted submission is good for. A change of this or the next three makes replicas refuse each
other's cuts."""

MAX_UNJUDGED: Final = 8
"""Submissions that nobody judged yet and that count as accepted ones for the budget."""

BUDGET_CUTS: Final = 1024
"""Cuts after which a member may have one entry more."""

ELECTOR_BUDGET_CUTS: Final = 16
"""The same for an elector in force: it carries what the others signed into the log."""

MISSED_VERDICTS: Final = 8
"""Due verdicts in a row that a validator may leave to the other due ones before it stands no longer."""
