"""The forger zoo: every cheap way we know to make what an honest author makes, for calibration and for tests.

A forger answers prescribed prompts and seeds with protocol groups, as an honest author does, and saves work or gains
reward by it. Each is the strongest of its kind that costs less than honest work does:

1. Those who generate with other weights come in two forms: with their own log-probabilities and proofs, and with those
   of a prefill on the right weights ("+ prefill"), which costs about half of generating and hides everything but the
   choice of tokens.
2. Quantised weights are rounded to symmetric grids: int8 with a scale for each row, int4 with one for each 32 values.
   So they differ from the Q4_1 grid (with offsets) that published GGUF files are made on.
3. The smaller model is the right one without its last third of layers: no other small model is as close to it.
4. Stale weights are real ones: the versions that the trainer's own steps lead through, at the domain's learning rate
   (``node.workers.calibration_child.aged``).
5. Many forgers begin with the same tokens, so what was written for a job is kept for those after it: the zoo costs
   ten generations and not twenty-five.

Needs torch, and so runs in child processes only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import cycle, islice
from typing import Final, Generic, TypeVar

import numpy as np
import torch

from node.workers.child_messages import WrittenGroup
from node.workers.engine_child import Claim, prefill
from node.workers.generation import SamplingSettings, Written, build_proofs, generate, micro, states_array
from node.workers.model import LanguageModel
from proofs import activation, sampling
from protocol.constants import FIELD_PRIME, MILLION, PROOF_CHUNK_TOKENS
from protocol.errors import LocalError
from protocol.work import schedule
from protocol.work.rollout import FINISH_END, Group, Response, unpack

Scorer = Callable[[int, Sequence[int]], int]
"""The reward (micro) of the response (tokens) to the prompt of this index."""

Value = TypeVar("Value")

WRITTEN: Final = 8
"""Jobs' answers that are kept (rule 5)."""
MODELS: Final = 1
"""Other weights that are kept at once beside the right ones."""
BEST_OF: Final = 4
"""Seeds that the cherry-picker draws from for each response."""
COLDER: Final = 0.9
"""The factor of the temperature that is not the recipe's."""


def no_reward(prompt: int, tokens: Sequence[int]) -> int:
    """For where no task scores: everything is wrong."""
    return 0


class Kept(Generic[Value]):
    """The ``most`` newest results of something slow, by what they are of."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Hashable, Value] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The result for ``key``, made where it is not kept."""
        if key not in self._values:
            value = make()
            while len(self._values) >= self._most:
                del self._values[next(iter(self._values))]
            self._values[key] = value
        return self._values[key]


@dataclass(frozen=True, slots=True)
class Job:
    """What an author is to answer: ``prompts`` (tokens) under ``seeds``, counters from ``first`` on; ``number`` is the
    index of the first prompt for the scorer. ``other`` are the honest groups of another node."""

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[bytes]
    first: int = 0
    number: int = 0
    other: Sequence[Group] = ()


@dataclass(frozen=True, slots=True)
class Forger:
    """``make`` answers a job; ``saves`` says what the forger gains, for people."""

    name: str
    saves: str
    make: Callable[[Stage, Job], list[Group]]


@dataclass(slots=True)
class Stage:
    """The right weights (``model``), and how to make versions so many steps ``older``; how responses are sampled and
    scored."""

    model: LanguageModel
    settings: SamplingSettings
    older: Callable[[int], LanguageModel]
    score: Scorer = no_reward
    _models: Kept[LanguageModel] = field(default_factory=lambda: Kept(MODELS))
    _kept: Kept[list[list[Written]]] = field(default_factory=lambda: Kept(WRITTEN))

    def weights(self, name: str) -> LanguageModel:
        """The weights of this name: "right", "v-1", "v-3" (so many steps older), "int8", "int4" or "smaller"."""
        make: Mapping[str, Callable[[], LanguageModel]] = {
            "v-1": lambda: self.older(1),
            "v-3": lambda: self.older(3),
            "int8": lambda: quantised(self.model, 8),
            "int4": lambda: quantised(self.model, 4),
            "smaller": lambda: smaller(self.model),
        }
        return self.model if name == "right" else self._models.get(name, make[name])

    def groups(
        self, job: Job, written: Sequence[Sequence[Written]], proofs: Sequence[bytes] | None = None
    ) -> list[Group]:
        """Protocol groups of what was written, scored; with own proofs unless others are given."""
        made = build_proofs(written) if proofs is None else proofs
        return [
            self._group(job, index, [(one.tokens, one.logprobs, one.finish) for one in group], proof)
            for index, (group, proof) in enumerate(zip(written, made, strict=True))
        ]

    def _group(
        self, job: Job, index: int, lines: Sequence[tuple[Sequence[int], Sequence[int], int]], proof: bytes
    ) -> Group:
        """The answer to the prompt of this index: tokens, log-probabilities and the end of each response, scored."""
        responses = tuple(
            Response(tuple(tokens), tuple(logprobs), self.score(job.number + index, tokens), finish)
            for tokens, logprobs, finish in lines
        )
        return Group(job.first + index, tuple(job.prompts[index]), responses, proof)

    def write(self, job: Job, weights: str = "right", settings: SamplingSettings | None = None) -> list[list[Written]]:
        """The answers of the weights of this name to a job."""
        chosen = self.settings if settings is None else settings
        key = (weights, chosen, tuple(job.seeds), tuple(map(tuple, job.prompts)))
        return self._kept.get(key, lambda: generate(self.weights(weights), job.prompts, job.seeds, chosen))

    def received(self, job: Job, answers: Sequence[WrittenGroup]) -> list[Group]:
        """Protocol groups of what an engine in a process of its own answered (``node.workers.engine_child``),
        scored."""
        found = []
        for index, (prompt, answer) in enumerate(zip(job.prompts, answers, strict=True)):
            if unpack(answer.prompt) != tuple(prompt):
                raise LocalError("an engine reads the prompts otherwise")
            lines = [(unpack(one.tokens), unpack(one.logprobs), one.finish) for one in answer.responses]
            found.append(self._group(job, index, lines, answer.proofs))
        return found

    def honest(self, job: Job) -> list[Group]:
        """What an honest author sends."""
        return self.groups(job, self.write(job))

    def prefilled(self, job: Job, written: Sequence[Sequence[Written]]) -> list[Group]:
        """Others' tokens with the log-probabilities and proofs of a prefill on the right weights."""
        states = prefill(self.model, claims_of(job, written))
        groups = []
        for group, hidden in zip(written, states, strict=True):
            tokens = torch.tensor([token for one in group for token in one.tokens])
            with torch.inference_mode():
                values = sampling.logprobs(self.model.logits(hidden), tokens, self.settings.temperature)
            lines = torch.split(micro(values), [len(one.tokens) for one in group])
            groups.append([replace(one, logprobs=line.tolist()) for one, line in zip(group, lines, strict=True)])
        return self.groups(job, groups, activation.build_many([states_array(hidden) for hidden in states]))


def claims_of(job: Job, written: Sequence[Sequence[Written]]) -> list[Claim]:
    """What replay takes of groups without proofs."""
    return [
        Claim(seed, prompt, [one.tokens for one in group], [one.logprobs for one in group], b"")
        for seed, prompt, group in zip(job.seeds, job.prompts, written, strict=True)
    ]


def claim_of(seed: bytes, group: Group) -> Claim:
    """What replay takes of a protocol group."""
    return Claim(
        seed, group.prompt, [r.tokens for r in group.responses], [r.logprobs for r in group.responses], group.proofs
    )


def job(prompts: Sequence[Sequence[int]], node: str, first: int = 0, number: int = 0) -> Job:
    """A job for a node of this name, with the seeds that the protocol prescribes in a domain made up."""
    ids = [sha256(part.encode()).digest() for part in ("domain", "weights", node)]
    seeds = [schedule.seed(ids[0], ids[1], ids[2], counter) for counter in range(first, first + len(prompts))]
    return Job(prompts, seeds, first, number)


# Cheaper weights


@torch.no_grad()
def quantised(model: LanguageModel, bits: int) -> LanguageModel:
    """A copy whose matrices lie on symmetric grids (rule 2); norms and biases stay as they are."""
    made = copy.deepcopy(model)
    most = 2 ** (bits - 1) - 1
    for parameter in made.parameters():
        if parameter.dim() != 2:
            continue
        block = parameter.shape[1] if bits == 8 or parameter.shape[1] % 32 else 32
        rows = parameter.float().reshape(-1, block)
        scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most
        parameter.copy_(((rows / scale).round().clamp(-most, most) * scale).reshape(parameter.shape))
    return made


def smaller(model: LanguageModel) -> LanguageModel:
    """A model of the first two thirds of the layers, with the same weights otherwise."""
    kept = max(1, math.floor(model.config.layers * 2 / 3))
    made = copy.deepcopy(model)
    made.config = replace(model.config, layers=kept)
    made.shorten(kept)
    return made


# The forgers


def _own(name: str) -> Callable[[Stage, Job], list[Group]]:
    return lambda stage, job: stage.groups(job, stage.write(job, name))


def _hidden(name: str) -> Callable[[Stage, Job], list[Group]]:
    return lambda stage, job: stage.prefilled(job, stage.write(job, name))


def _colder(stage: Stage, job: Job) -> list[Group]:
    settings = replace(stage.settings, temperature=stage.settings.temperature * COLDER)
    return stage.prefilled(job, stage.write(job, settings=settings))


def _greedy(stage: Stage, job: Job) -> list[Group]:
    settings = replace(stage.settings, temperature=stage.settings.temperature / 1000, group_size=1)
    once = stage.write(job, settings=settings)
    return stage.prefilled(job, [group * stage.settings.group_size for group in once])


def _best_of(stage: Stage, job: Job) -> list[Group]:
    """Of ``BEST_OF`` seeds the response of the highest reward; where rewards are equal, of the highest probability."""
    tries = []
    for number in range(BEST_OF):
        seeds = [bytes([number ^ seed[0]]) + seed[1:] for seed in job.seeds]
        tries.append(stage.write(replace(job, seeds=seeds)))
    best = []
    for index in range(len(job.prompts)):
        rows = zip(*(attempt[index] for attempt in tries), strict=True)
        best.append(
            [max(row, key=lambda w: (stage.score(job.number + index, w.tokens), -sum(w.logprobs))) for row in rows]
        )
    return stage.prefilled(job, best)


def _repeated(stage: Stage, job: Job) -> list[Group]:
    """One response a group, sent as all of them."""
    return stage.prefilled(job, [group[:1] * stage.settings.group_size for group in stage.write(job)])


def _shorter(stage: Stage, job: Job, end: bool) -> list[Group]:
    """Each response is broken off in its middle; with ``end`` an end token makes it look finished."""
    written = []
    for group in stage.write(job):
        line = []
        for one in group:
            half = max(1, len(one.tokens) // 2)
            tokens = [*one.tokens[: half - 1], stage.settings.end_token] if end else one.tokens[:half]
            line.append(Written(tokens, one.logprobs[:half], stage.settings.finish(tokens), one.states[:half]))
        written.append(line)
    return stage.prefilled(job, written)


def _ended(stage: Stage, job: Job) -> list[Group]:
    """In each group one response ends in its first half, where the end token is nearest to being the right choice."""
    written = stage.write(job)
    end = stage.settings.end_token
    made = []
    for seed, group, hidden in zip(job.seeds, written, prefill(stage.model, claims_of(job, written)), strict=True):
        keys = sampling.keys_tensor((seed, n, place) for n, one in enumerate(group) for place in range(len(one.tokens)))
        with torch.inference_mode():
            missing = sampling.deficits(
                stage.model.logits(hidden),
                keys.to(hidden.device),
                torch.full((len(hidden),), end, device=hidden.device),
                stage.settings.temperature,
                stage.settings.min_p,
            )
        lines = torch.split(missing, [len(one.tokens) for one in group])
        halves = [line[: len(line) // 2] for line in lines]
        able = [n for n, half in enumerate(halves) if len(half)]
        changed = list(group)
        if able:
            best = min(able, key=lambda n: float(halves[n].min()))
            one, place = group[best], int(halves[best].argmin())
            changed[best] = Written(
                [*one.tokens[:place], end], one.logprobs[: place + 1], FINISH_END, one.states[: place + 1]
            )
        made.append(changed)
    return stage.prefilled(job, made)


def _full_marks(stage: Stage, job: Job) -> list[Group]:
    return [
        replace(group, responses=tuple(replace(response, reward=MILLION) for response in group.responses))
        for group in stage.honest(job)
    ]


def _copied(stage: Stage, job: Job, own_prompt: bool) -> list[Group]:
    """Another node's groups under own counters; with ``own_prompt`` behind the prescribed prompts."""
    return [
        replace(group, counter=job.first + index, prompt=tuple(job.prompts[index]) if own_prompt else group.prompt)
        for index, group in enumerate(islice(cycle(job.other), len(job.prompts)))
    ]


def _proofs(change: Callable[[Stage, Sequence[Group], int], bytes]) -> Callable[[Stage, Job], list[Group]]:
    """Honest groups with other proofs: no work is saved by it alone, so it must be told by itself."""

    def make(stage: Stage, job: Job) -> list[Group]:
        groups = stage.honest(job)
        return [replace(group, proofs=change(stage, groups, index)) for index, group in enumerate(groups)]

    return make


def _chunks(stage: Stage, group: Group) -> list[bytes]:
    size = activation.proof_bytes(PROOF_CHUNK_TOKENS, stage.model.config.hidden)
    return [group.proofs[start : start + size] for start in range(0, len(group.proofs), size)]


def _constant(stage: Stage, groups: Sequence[Group], index: int) -> bytes:
    """The polynomial that is 4.0 everywhere: a usual magnitude of the largest values."""
    head = FIELD_PRIME.to_bytes(2, "big") + (0x4080).to_bytes(2, "big")
    return b"".join(head + bytes(len(chunk) - 4) for chunk in _chunks(stage, groups[index]))


def _of_other_text(stage: Stage, groups: Sequence[Group], index: int) -> bytes:
    """The proof of another group's states, as many as this one has."""
    other, wanted = groups[index - 1], sum(len(response.tokens) for response in groups[index].responses)
    (states,) = prefill(stage.model, [claim_of(bytes(32), other)])
    line = states_array(states)[::-1]  # backwards, so that a group alone is not its own other
    return activation.build(np.concatenate([line] * (wanted // len(line) + 1))[:wanted])


def _of_other_prompt(stage: Stage, groups: Sequence[Group], index: int) -> bytes:
    """The proof of the same responses behind another prompt."""
    prompt = groups[index - 1].prompt if len(groups) > 1 else groups[index].prompt[::-1]
    (states,) = prefill(stage.model, [claim_of(bytes(32), replace(groups[index], prompt=prompt))])
    return activation.build(states_array(states))


def _modulus(value: int) -> Callable[[Stage, Sequence[Group], int], bytes]:
    def change(stage: Stage, groups: Sequence[Group], index: int) -> bytes:
        return b"".join(value.to_bytes(2, "big") + chunk[2:] for chunk in _chunks(stage, groups[index]))

    return change


ZOO: Final = (
    Forger("constant polynomial", "computing no activations", _proofs(_constant)),
    Forger("proof of another text", "computing no activations", _proofs(_of_other_text)),
    Forger("proof behind another prompt", "computing no activations", _proofs(_of_other_prompt)),
    Forger("missing chunks", "computing no activations", _proofs(lambda s, g, i: b"".join(_chunks(s, g[i])[:-1]))),
    Forger("modulus 0", "crashing the verifier", _proofs(_modulus(0))),
    Forger("modulus 1", "one value stands for all", _proofs(_modulus(1))),
    Forger("smaller model", "a third of the layers", _own("smaller")),
    Forger("smaller model + prefill", "a third of decoding", _hidden("smaller")),
    Forger("int8 weights", "half of bfloat16's memory traffic", _own("int8")),
    Forger("int8 weights + prefill", "memory traffic of decoding", _hidden("int8")),
    Forger("int4 weights", "three quarters of the memory traffic", _own("int4")),
    Forger("int4 weights + prefill", "memory traffic of decoding", _hidden("int4")),
    Forger("weights one version old", "waiting for the newest", _own("v-1")),
    Forger("weights one version old + prefill", "waiting for the newest", _hidden("v-1")),
    Forger("weights three versions old", "fetching three versions", _own("v-3")),
    Forger("weights three versions old + prefill", "fetching three versions", _hidden("v-3")),
    Forger("temperature 0.9 of the recipe's", "higher rewards", _colder),
    Forger("no noise (greedy)", "higher rewards, one response for all", _greedy),
    Forger("best of 4 seeds", "higher rewards", _best_of),
    Forger("one response for all", "all decoding but one response", _repeated),
    Forger("responses broken off", "half of decoding", lambda s, j: _shorter(s, j, False)),
    Forger("responses ended early", "half of decoding", lambda s, j: _shorter(s, j, True)),
    Forger("one response a group ended early", "half of one response", _ended),
    Forger("invented rewards", "higher rewards", _full_marks),
    Forger("copy under another key", "everything", lambda s, j: _copied(s, j, False)),
    Forger("copied responses", "everything", lambda s, j: _copied(s, j, True)),
)
"""Every forger, by name unique."""
