"""What the daemon asks of the children that compute, and what they answer. Imports no torch: both ends do.

Paths are texts. Tokens and log-probabilities are little-endian 32-bit arrays, as a submission holds them
(``protocol.work.rollout.pack``).
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from node.workers.frames import ChildRequest
from proofs.checks import GroupReplay
from protocol.domain import Recipe

AUTO: Final = "auto"
"""A device: a GPU where torch has one, else the processor."""

TensorRow = tuple[str, str, tuple[int, ...]]
"""A tensor's name, dtype and shape, as they go into ``Manifest.of_file``."""


# The engine child (``node.workers.engine_child``), and the same on vLLM (``node.workers.vllm_child``)


class EngineReady(Struct, frozen=True):
    """What is known of the model: its end token, and how many tokens there are."""

    end_token: int
    vocabulary: int


class ConfigureEngine(ChildRequest[EngineReady], frozen=True, tag="configure"):
    """Read the model's ``config`` and ``tokenizer`` (paths) and make the model; no weights are loaded yet.

    The last three are vLLM's; ``cache_bytes`` and ``max_batched_tokens`` replace what it works out for itself.
    """

    config: str
    tokenizer: str
    recipe: Recipe
    dtype: str = "float32"
    threads: int = 1
    device: str = AUTO
    tensor_parallel: int = 1
    cache_bytes: int | None = None
    max_batched_tokens: int | None = None


class LoadVersion(ChildRequest[int], frozen=True, tag="load"):
    """Load a version, given the paths of its manifest and whole file. Answers the checksum of what the engine then
    computes with, which the caller compares with the manifest's before it uses the engine."""

    manifest: str
    weights: str


class EncodePrompts(ChildRequest[list[bytes]], frozen=True, tag="encode"):
    """The prompts' tokens, as a submission must hold them."""

    prompts: list[str]


class WrittenResponse(Struct, frozen=True, array_like=True):
    """A response that was generated; ``finish`` as of ``protocol.work.rollout``."""

    tokens: bytes
    logprobs: bytes
    finish: int
    text: str


class WrittenGroup(Struct, frozen=True):
    """The responses to one prompt, with their activation proofs."""

    prompt: bytes
    responses: list[WrittenResponse]
    proofs: bytes


class WrittenGroups(Struct, frozen=True):
    """The groups of one request, how many response ``tokens`` they have, and the seconds it took."""

    groups: list[WrittenGroup]
    tokens: int
    seconds: float


class GenerateGroups(ChildRequest[WrittenGroups], frozen=True, tag="generate"):
    """A group of responses, with proofs, for each prompt and 32-byte seed."""

    prompts: list[str]
    seeds: list[bytes]


class ClaimedGroup(Struct, frozen=True):
    """A group to replay: the ``seed`` of its noise, its prompt, and each response's tokens and log-probabilities."""

    seed: bytes
    prompt: bytes
    responses: list[tuple[bytes, bytes]]
    proofs: bytes


class ReplayedGroup(Struct, frozen=True):
    """What replaying a group measured, and the responses' texts."""

    found: GroupReplay
    texts: list[str]


class ReplayGroups(ChildRequest[list[ReplayedGroup]], frozen=True, tag="replay"):
    """Measure others' groups; ``clip`` is the domain's ``deficit_clip``."""

    groups: list[ClaimedGroup]
    clip: int


class Benchmark(ChildRequest[int], frozen=True, tag="benchmark"):
    """Response tokens a second with the loaded weights, over a few short groups."""


class CountRewritten(ChildRequest[int], frozen=True, tag="rewritten"):
    """How many places vLLM has chosen for more than once so far: prompts read in parts, and preemption."""


class ConvertedModel(Struct, frozen=True):
    """Version 0: its tensors in the file's order, their checksum, the paths of ``config`` and ``tokenizer``, and how
    many ``positions`` a sequence may take (None: no limit)."""

    tensors: list[TensorRow]
    checksum: int
    config: str
    tokenizer: str
    architecture: str
    positions: int | None


class ConvertModel(ChildRequest[ConvertedModel], frozen=True, tag="convert"):
    """Make version 0's whole file ``output`` from a Hugging Face folder (``node.workers.architectures``)."""

    model_dir: str
    output: str
    dtype: str = "float32"


# The trainer child (``node.workers.trainer_child``)


class TrainerReady(Struct, frozen=True):
    """How many ``parameters`` the model has and ``processes`` share it, and whether activations are recomputed."""

    parameters: int
    processes: int
    recompute: bool


class ConfigureTrainer(ChildRequest[TrainerReady], frozen=True, tag="configure"):
    """Read the model's ``config`` (a path).

    ``dtype`` is the one in which the domain computes; ``recompute`` says whether activations are computed again for the
    backward pass: "on", "off" or, by the memory there is, "auto".
    """

    config: str
    recipe: Recipe
    threads: int = 1
    dtype: str = "float32"
    device: str = AUTO
    recompute: str = "auto"


class LoadTraining(ChildRequest[int], frozen=True, tag="load"):
    """Load a version, and the checkpoint that goes with it where there is one; else the optimizer starts afresh.

    ``reference`` are the manifest's and the whole file's path of version 0, for a recipe with a KL term. Answers the
    checksum of what was loaded.
    """

    manifest: str
    weights: str
    checkpoint: str | None = None
    reference: tuple[str, str] | None = None


class Trained(Struct, frozen=True, tag="trained"):
    """A step that was made: the ``metrics`` of ``node.workers.learner``, how many responses and tokens were
    ``trained`` on, and the new version's tensors and checksum."""

    metrics: dict[str, int | float]
    trained: int
    tokens: int
    tensors: list[TensorRow]
    checksum: int


class TrainingStopped(Struct, frozen=True, tag="stopped"):
    """A step that had to be stopped, and why. Nothing was written."""

    reason: str


class TrainStep(ChildRequest[Trained | TrainingStopped], frozen=True, tag="train"):
    """One step over the submissions in these files. Writes the next version's whole file and its checkpoint."""

    submissions: list[str]
    output: str
    checkpoint: str


# The delta child (``node.workers.delta_child``)


class DescribedVersion(Struct, frozen=True):
    """The encoded ``manifest``, the encoded ``delta_manifest`` (None where there is no base, another layout, or too
    much or nothing changed), how many values ``changed``, and the seconds it took."""

    manifest: bytes
    delta_manifest: bytes | None
    changed: int
    seconds: float


class DescribeVersion(ChildRequest[DescribedVersion], frozen=True, tag="describe"):
    """The manifest of the file ``whole``, which holds ``tensors``. With the folder of a ``base``, what changed is
    written to the file ``delta``."""

    tensors: list[TensorRow]
    checksum: int
    whole: str
    base: str | None = None
    delta: str | None = None
    threads: int = 1


class AppliedDelta(Struct, frozen=True):
    """How many chunks were ``written``, the indices of those that came out ``wrong`` (not written), and the seconds."""

    written: int
    wrong: list[int]
    seconds: float


class ApplyDelta(ChildRequest[AppliedDelta], frozen=True, tag="apply"):
    """Make the version in the folder ``target`` from the version and the delta in the other two. Chunks that are marked
    as verified are passed over."""

    delta: str
    base: str
    target: str
    threads: int = 1


# The calibration child (``node.workers.calibration_child``)

Figures = tuple[int, list[float], int, int, int, int, int]
"""A group's row of figures (``proofs.limits``)."""


class CalibrationReady(Struct, frozen=True):
    """The ``ways`` in which honest groups are made (engine, groups at once, threads), the ``forgers`` (name, what it
    saves), and whether bfloat16 is ``emulated``."""

    ways: list[tuple[str, int, int]]
    forgers: list[tuple[str, str]]
    emulated: bool


class PrepareCalibration(ChildRequest[CalibrationReady], frozen=True, tag="prepare"):
    """Load the model in a folder, and train the versions that stale weights come from."""

    model: str
    dtype: str
    recipe: Recipe
    prompts: list[str]
    threads: int


class MeasureHonest(ChildRequest[list[Figures]], frozen=True, tag="honest"):
    """Figures of ``count`` honest groups, made in the way of this number."""

    way: int
    first: int
    count: int


class MeasureForged(ChildRequest[list[Figures]], frozen=True, tag="forged"):
    """Figures of ``count`` groups of a forger."""

    name: str
    first: int
    count: int


class StoreJudge(ChildRequest[LoadVersion], frozen=True, tag="store"):
    """Write the weights into ``folder`` as a version, for an engine in a process of its own to load."""

    folder: str


class AskOther(ChildRequest[GenerateGroups], frozen=True, tag="asked"):
    """What another engine is to be asked."""

    first: int
    count: int


class MeasureOther(ChildRequest[list[Figures]], frozen=True, tag="measured"):
    """Figures of what the other engine answered."""

    first: int
    groups: list[WrittenGroup]


# The child of a tracker (``node.workers.tracker_child``)


class TensorBoardFolder(Struct, frozen=True, tag="tensorboard"):
    """Event files in ``folder``."""

    folder: str


class WandBRun(Struct, frozen=True, tag="wandb"):
    """A run of Weights & Biases in ``project``; its files lie in ``folder``. ``run`` is the run's id, so that a node
    that starts again goes on with it."""

    folder: str
    project: str
    name: str
    run: str
    config: dict[str, str]


class TrackerRow(Struct, frozen=True):
    """A row of metrics: its ``kind``, its UNIX ``time``, the ``version`` it is about, and its numbers by their names
    ``<kind>/<field>``."""

    kind: str
    time: float
    version: int
    scalars: dict[str, float]


class OpenTracker(ChildRequest[None], frozen=True, tag="open"):
    """Open the tracker that rows go to."""

    tracker: TensorBoardFolder | WandBRun


class LogRows(ChildRequest[None], frozen=True, tag="log"):
    """Give it rows: they are on the disk, or in the library's hands, when the answer comes."""

    rows: list[TrackerRow]


class FinishTracker(ChildRequest[None], frozen=True, tag="finish"):
    """Close it."""
