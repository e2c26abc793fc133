"""The calibration child: honest and forged work with one model, measured as an audit measures it.

1. Audits are in float32, whatever dtype is generated in. In a bfloat16 domain weights are published in bfloat16, and so
   is what audits load.
2. Honest work is done by every engine that is here: our own at several batch sizes, Hugging Face transformers, and what
   the caller brings: vLLM, in its own process (``asked``, ``measured``). Where the processor has no bfloat16
   instructions, ours and transformers compute products by float32 kernels and round every result, as accelerators do:
   it is five times faster than emulated instructions, with the same rounding. A model that transformers computes anyway
   (``node.workers.transformers_model``) has no second engine, and does without those kernels.
3. Stale weights are versions that real optimizer steps lead through (``aged``).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from node.errors import UserError
from node.starter import defaults
from node.workers import child_loop, forger_zoo, transformers_engine
from node.workers.architectures import build, read_config, read_folder
from node.workers.child_messages import (
    AskOther,
    CalibrationReady,
    Figures,
    GenerateGroups,
    LoadVersion,
    MeasureForged,
    MeasureHonest,
    MeasureOther,
    PrepareCalibration,
    StoreJudge,
)
from node.workers.engine_child import Measured, Texts, measure, prefill
from node.workers.forger_zoo import Job, Scorer, Stage, claim_of
from node.workers.generation import SamplingSettings, Written, generate
from node.workers.learner import Learner, TrainingSample
from node.workers.model import CausalLM, LanguageModel
from node.workers.policy import TrainedPolicy
from node.workers.sharding import Ranks
from node.workers.weight_files import checksum, layout, load_into, write_whole
from protocol.constants import MILLION
from protocol.domain import Recipe
from protocol.errors import LocalError
from protocol.weights.manifest import Manifest
from protocol.work.rollout import Group

STARTER_PROMPTS = 256
AT_ONCE = 4
"""Groups that honest authors make at once, at most."""
TRAINED_GROUPS = 2
"""Groups that each step between versions learns from."""
PREFILLED = 12
"""Jobs whose states are kept for the forgers who send the same tokens."""


class Wide(nn.Linear):
    """A bfloat16 layer as accelerators compute it: products added up in float32, the result rounded."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], bfloat16."""
        return functional.linear(x.float(), self.weight, self.bias).to(torch.bfloat16)


class Rounding(CausalLM):
    """A model that computes in bfloat16, with ``Wide`` layers."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in float32, rounded to bfloat16, of final-norm states [..., H]."""
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return functional.linear(hidden.float(), head.float()).to(torch.bfloat16).float()


def widened(model: Any) -> Any:
    """``model`` (float32) made to compute in bfloat16 with ``Wide`` layers."""
    model = model.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.float(), requires_grad=False)
            module.__class__ = Wide
    return model


def rounding(model: CausalLM) -> CausalLM:
    """A copy of ``model`` (float32) that computes in bfloat16."""
    made: CausalLM = widened(copy.deepcopy(model))
    made.__class__ = Rounding
    return made


def native_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16 " in flags


def figures(found: Measured) -> Figures:
    """A group's row of figures."""
    deficits = found.deficits[found.deficits > 0].double() * MILLION
    proven = found.activations
    return (
        len(found.deficits),
        [round(value, 1) for value in deficits.tolist()],
        int(found.logprob_errors.max()),
        proven.values,
        proven.mismatches,
        proven.mantissa_sum,
        proven.mantissa_median,
    )


def aged(
    model: LanguageModel, job: Job, settings: SamplingSettings, recipe: Recipe, score: Scorer | None, steps: int
) -> list[LanguageModel]:
    """``model`` and the versions after each of ``steps`` training steps on its own answers to ``job``.

    Without a scorer, rewards are made up (every second response is right): how far an optimizer step moves the weights
    is set by the learning rate, hardly by what it learns.
    """
    versions = [model]
    policy = TrainedPolicy(copy.deepcopy(model).float().requires_grad_(True), recipe.temperature / MILLION)
    learner = Learner(policy, replace(recipe, kl=0), Ranks(0, 1, model.device))
    learner.updates = recipe.warmup_steps  # versions in the middle of a run, at the full learning rate
    for _ in range(steps):
        newest = versions[-1]
        samples = []
        for index, group in enumerate(generate(newest, job.prompts, job.seeds, settings)):
            rewards = [
                (MILLION * (place % 2) if score is None else score(job.number + index, one.tokens))
                for place, one in enumerate(group)
            ]
            samples.append(
                TrainingSample(job.prompts[index], [o.tokens for o in group], [o.logprobs for o in group], rewards)
            )
        learner.train(samples)
        versions.append(copy.deepcopy(learner.policy.model).to(model.dtype).requires_grad_(False))
    return versions


@dataclass(frozen=True, slots=True)
class Way:
    """A way in which an honest author works: ``engine``, groups made ``at_once``, processor ``threads``."""

    engine: str
    at_once: int
    threads: int
    make: Callable[[Job], list[Group]]


class Laboratory:
    """A model with the versions of its weights that authors and forgers use, and the float32 one that judges.

    ``training`` is what the steps between versions learn from; ``cache`` a file that keeps the versions. Raises
    ``UserError`` for a folder that is no model.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        recipe: Recipe,
        training: Callable[[Laboratory], Job],
        score: Scorer | None = None,
        cache: Path | None = None,
    ) -> None:
        config = read_config(folder / "config.json")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.dtype = dtype
        self.recipe = recipe
        self.settings = SamplingSettings.of(recipe, config)
        self.texts = Texts(folder / "tokenizer.json", config)
        base = build(config).requires_grad_(False)
        load_into(base, read_folder(config, folder))
        if cache is not None and cache.exists():
            states = torch.load(cache, mmap=True)
        else:
            versions = aged(base, training(self), self.settings, recipe, score, 3)
            states = [versions[number].state_dict() for number in (3, 2, 0)]
            if cache is not None:
                torch.save(states, cache)
        self.wide = dtype == torch.bfloat16 and not native_bfloat16() and not config.foreign

        def loaded(state: dict[str, Tensor]) -> LanguageModel:
            one = build(config).requires_grad_(False)
            one.load_state_dict({name: value.to(dtype).float() for name, value in state.items()})
            return one

        def computing(one: LanguageModel) -> LanguageModel:
            """As an author computes with these weights."""
            if dtype == torch.float32:
                return one
            return rounding(one) if self.wide and isinstance(one, CausalLM) else copy.deepcopy(one).to(dtype)

        def older(steps: int) -> LanguageModel:
            return computing(loaded(states[{1: 1, 3: 2}[steps]]))

        self.judge = loaded(states[0])
        self.model = computing(self.judge)
        self.stage = Stage(self.model, self.settings, older, forger_zoo.no_reward if score is None else score)
        self._second: Any = None
        self._states: forger_zoo.Kept[list[Tensor]] = forger_zoo.Kept(PREFILLED)

    def ways(self, most: int) -> list[Way]:
        """The ways in which ``most`` groups or fewer are made at once here."""
        sizes = sorted({1, min(3, most), most})
        found = [Way("ours", size, threads, self._ours(size)) for size in sizes for threads in (1, 2)]
        if not self.model.config.foreign:
            found.append(Way("transformers", most, 1, self._theirs))
        return found

    def _ours(self, at_once: int) -> Callable[[Job], list[Group]]:
        def make(job: Job) -> list[Group]:
            parts: list[list[Written]] = []
            for start in range(0, len(job.prompts), at_once):
                part = slice(start, start + at_once)
                parts += generate(self.model, job.prompts[part], job.seeds[part], self.settings)
            return self.stage.groups(job, parts)

        return make

    def _theirs(self, job: Job) -> list[Group]:
        if self._second is None:
            made = transformers_engine.build(self.judge, self.config)
            self._second = widened(made) if self.wide else made.to(self.dtype)
        return self.stage.groups(job, transformers_engine.generate(self._second, job.prompts, job.seeds, self.settings))

    def work(self, way: Way, job: Job) -> list[Group]:
        """Honest groups, made in this way."""
        threads = torch.get_num_threads()
        torch.set_num_threads(way.threads)
        try:
            return way.make(job)
        finally:
            torch.set_num_threads(threads)

    def store(self, folder: Path) -> tuple[Path, Path]:
        """Write the weights that judge into ``folder`` as a version; its manifest and its whole file."""
        tensors = {name: value.detach().to(self.dtype) for name, value in sorted(self.judge.named_parameters())}
        manifest, whole = folder / "version.manifest", folder / "version.raw"
        write_whole(tensors.values(), whole)
        described = Manifest.of_file(layout(tensors), whole.read_bytes(), checksum(self.judge))
        manifest.write_bytes(described.encode())
        return manifest, whole

    def judged(self, job: Job, groups: Sequence[Group]) -> list[Figures]:
        """A row of figures for each group. Forgers who send the same tokens are prefilled once."""
        if not groups:
            return []
        claims = [claim_of(seed, group) for seed, group in zip(job.seeds, groups, strict=True)]
        key = tuple((group.prompt, tuple(response.tokens for response in group.responses)) for group in groups)
        states = self._states.get(key, lambda: prefill(self.judge, claims))
        return [figures(found) for found in measure(self.judge, claims, self.settings, states)]


def starter_prompts() -> list[str]:
    """Questions of the task that the starter model is trained on."""
    # Imported here: whoever brings prompts need not wait for it.
    from node.tasks.reasoning_tasks import ReasoningTask

    task = defaults.TASKS[0]
    made = ReasoningTask(task.name, task.parameters, task.version, sandboxed=False)
    return [made.question(item) for item in range(STARTER_PROMPTS)]


class Calibration:
    """The child's state; its public methods are operations."""

    def __init__(self) -> None:
        self._laboratory: Laboratory | None = None
        self._prompts: list[str] = []

    def prepare(self, request: PrepareCalibration) -> CalibrationReady:
        """Load the model, and train the versions that stale weights come from."""
        torch.set_num_threads(request.threads)
        self._prompts = request.prompts or starter_prompts()
        try:
            made = Laboratory(
                Path(request.model),
                getattr(torch, request.dtype),
                request.recipe,
                lambda made: self._job(made, "training", 0, TRAINED_GROUPS),
            )
        except OSError as error:
            raise UserError(f"{request.model}: cannot be read ({error.strerror})") from None
        self._laboratory = made
        return CalibrationReady(
            ways=[(way.engine, way.at_once, way.threads) for way in made.ways(AT_ONCE)],
            forgers=[(forger.name, forger.saves) for forger in forger_zoo.ZOO if forger.name in REPLAYED],
            emulated=made.wide,
        )

    def honest(self, request: MeasureHonest) -> list[Figures]:
        """Figures of honest groups."""
        made = self._ready()
        job = self._job(made, f"honest {request.way}", request.first, request.count)
        return made.judged(job, made.work(made.ways(AT_ONCE)[request.way], job))

    def store(self, request: StoreJudge) -> LoadVersion:
        """Write the weights as a version, for an engine in a process of its own to load."""
        manifest, whole = self._ready().store(Path(request.folder))
        return LoadVersion(str(manifest), str(whole))

    def asked(self, request: AskOther) -> GenerateGroups:
        """What another engine is to answer."""
        job = self._job(self._ready(), "another engine", request.first, request.count)
        numbers = range(request.first, request.first + request.count)
        return GenerateGroups([self._prompt(number) for number in numbers], list(job.seeds))

    def measured(self, request: MeasureOther) -> list[Figures]:
        """Figures of its answers."""
        made = self._ready()
        job = self._job(made, "another engine", request.first, len(request.groups))
        return made.judged(job, made.stage.received(job, request.groups))

    def forged(self, request: MeasureForged) -> list[Figures]:
        """Figures of a forger's groups."""
        made = self._ready()
        job = self._job(made, "forger", request.first, request.count)
        if request.name.startswith("cop"):
            other = self._job(made, "another", request.first, request.count)
            job = replace(job, other=made.stage.honest(other))
        forger = next(forger for forger in forger_zoo.ZOO if forger.name == request.name)
        return made.judged(job, forger.make(made.stage, job))

    def _ready(self) -> Laboratory:
        if self._laboratory is None:
            raise LocalError("prepare comes first")
        return self._laboratory

    def _prompt(self, number: int) -> str:
        return self._prompts[number % len(self._prompts)]

    def _job(self, made: Laboratory, node: str, first: int, count: int) -> Job:
        return forger_zoo.job(
            [
                made.texts.encode(self._prompt(number), made.settings.max_prompt_tokens)
                for number in range(first, first + count)
            ],
            node,
            first,
        )


REPLAYED = tuple(
    forger.name
    for forger in forger_zoo.ZOO
    if forger.name not in ("responses broken off", "invented rewards", "copy under another key")
)
"""Forgers that statistics find; the others fail checks that need no limits."""


if __name__ == "__main__":
    child_loop.run(lambda: child_loop.methods(Calibration()))
