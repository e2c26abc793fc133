"""The engine child: writes groups of responses with one version of the weights, and replays what others wrote.

1. How responses are written: ``node.workers.generation``.
2. Replay is one teacher-forced pass over prompts and responses. It measures and never judges: ``proofs.audit`` does.
3. It computes on a GPU where there is one (``node.workers.architectures``).

What it answers: ``node.workers.child_messages``. ``node.workers.vllm_child`` offers the same without the replay and the
conversion.
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from node.errors import UserError
from node.workers import child_loop, row_layout, weight_files
from node.workers.architectures import build, chosen, convert, read_config
from node.workers.child_messages import (
    Benchmark,
    ConfigureEngine,
    EncodePrompts,
    EngineReady,
    GenerateGroups,
    LoadVersion,
    ReplayedGroup,
    ReplayGroups,
    WrittenGroup,
    WrittenGroups,
    WrittenResponse,
)
from node.workers.generation import SamplingSettings, Written, build_proofs, generate, micro, states_array
from node.workers.model import LanguageModel
from node.workers.model_config import ModelConfig
from proofs import activation, sampling
from proofs.checks import GroupReplay
from protocol.constants import MILLION
from protocol.errors import LocalError
from protocol.work.rollout import pack, unpack

LOGIT_ELEMENTS = 1 << 24
"""Logits that a replay holds at once, for a vocabulary may be 10⁵ times a token. No influence on results."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A group to replay: its noise ``seed``, prompt, and each response's tokens and reported −log p in micro."""

    seed: bytes
    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[int]]
    proofs: bytes


@dataclass(frozen=True, slots=True)
class Measured:
    """What replaying one group found, before any clip: ``deficits`` [tokens] float32 in units of the score,
    ``logprob_errors`` [tokens] int64 in micro, and the comparison of the activations."""

    deficits: Tensor
    logprob_errors: Tensor
    activations: activation.ActivationResult

    def summary(self, clip: int) -> GroupReplay:
        """The figures that an audit judges; ``clip`` is the domain's ``deficit_clip`` in micro."""
        shares = (self.deficits.double() / (clip / MILLION)).clamp(max=1.0)
        return GroupReplay(
            tokens=len(self.deficits),
            mismatches=int((self.deficits > 0).sum()),
            deficit_sum=int((shares * MILLION).ceil().long().sum()),
            deficit_max=math.ceil(float(self.deficits.max()) * MILLION),
            logprob_error_max=int(self.logprob_errors.max()),
            activation_values=self.activations.values,
            activation_mismatches=self.activations.mismatches,
            mantissa_sum=self.activations.mantissa_sum,
            mantissa_median=self.activations.mantissa_median,
        )


@torch.inference_mode()
def prefill(model: LanguageModel, claims: Sequence[Claim]) -> list[Tensor]:
    """For each group the states [tokens, hidden] that chose its responses' tokens: one teacher-forced pass."""
    packed = row_layout.pack(
        [row_layout.RowGroup(claim.prompt, claim.responses) for claim in claims], device=model.device
    )
    hidden = torch.cat([row_layout.chosen_by(model, batch) for batch in packed])
    return list(torch.split(hidden, [sum(map(len, claim.responses)) for claim in claims]))


@torch.inference_mode()
def measure(
    model: LanguageModel, claims: Sequence[Claim], settings: SamplingSettings, states: Sequence[Tensor] | None = None
) -> list[Measured]:
    """What replaying each group finds. Tokens must be within the vocabulary (``proofs.audit.inspect``). ``states`` are
    those of an earlier ``prefill``."""
    found = prefill(model, claims) if states is None else list(states)
    hidden = torch.cat(found)
    targets = torch.tensor([token for claim in claims for line in claim.responses for token in line]).to(model.device)
    keys = sampling.keys_tensor(
        (claim.seed, number, position)
        for claim in claims
        for number, response in enumerate(claim.responses)
        for position in range(len(response))
    ).to(model.device)
    reported = torch.tensor([value for claim in claims for line in claim.logprobs for value in line])
    deficits = torch.empty(len(targets))
    logprobs = torch.empty(len(targets))
    step = max(1, LOGIT_ELEMENTS // model.config.vocabulary)
    for start in range(0, len(targets), step):
        block = slice(start, start + step)
        logits = model.logits(hidden[block])
        deficits[block] = sampling.deficits(logits, keys[block], targets[block], settings.temperature, settings.min_p)
        logprobs[block] = sampling.logprobs(logits, targets[block], settings.temperature)
    if not bool(torch.isfinite(deficits).all() and torch.isfinite(logprobs).all()):
        # Nobody can be judged by such weights, and every comparison with NaN would let a forger pass.
        raise LocalError("logits are not finite: the weights are broken")
    errors = (micro(logprobs) - reported).abs()
    proven = activation.verify_many(
        [(states_array(states), claim.proofs) for states, claim in zip(found, claims, strict=True)]
    )
    sizes = [len(states) for states in found]
    return [
        Measured(*parts) for parts in zip(torch.split(deficits, sizes), torch.split(errors, sizes), proven, strict=True)
    ]


def replay(model: LanguageModel, claims: Sequence[Claim], settings: SamplingSettings, clip: int) -> list[GroupReplay]:
    """What replaying each group measures, with deficits clipped at ``clip`` micro."""
    return [measured.summary(clip) for measured in measure(model, claims, settings)]


class Texts:
    """The tokenizer. All nodes must agree on what it yields, so what a file says on truncation and padding is
    ignored."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"cannot read the tokenizer {path}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._end_token = config.end_token
        if self._tokenizer.get_vocab_size() > config.vocabulary:
            raise UserError(f"the tokenizer {path} has more tokens than the model's vocabulary of {config.vocabulary}")

    def encode(self, text: str, most: int) -> list[int]:
        """The prompt's tokens, the first ``most`` of them where it is longer; never none (an empty text: the end
        token)."""
        ids: list[int] = self._tokenizer.encode(text).ids[:most]
        return ids or [self._end_token]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, without the end token that ends it; other special tokens stay visible to scorers."""
        line = list(tokens[:-1] if tokens[-1] == self._end_token else tokens)
        text: str = self._tokenizer.decode(line, skip_special_tokens=False)
        return text


class EngineChild(abc.ABC):
    """What every engine child does; its public methods are operations. A subclass generates with its own library."""

    def __init__(self) -> None:
        self._config: ModelConfig | None = None
        self._texts: Texts | None = None
        self._settings: SamplingSettings | None = None
        self._loaded = False

    def configure(self, request: ConfigureEngine) -> EngineReady:
        """Read the model's configuration and the tokenizer; no weights are loaded yet."""
        parsed = read_config(Path(request.config))
        self._settings = SamplingSettings.of(request.recipe, parsed)
        self._texts = Texts(Path(request.tokenizer), parsed)
        self._config = parsed
        self._loaded = False
        self._build(parsed, self._settings, request)
        return EngineReady(parsed.end_token, parsed.vocabulary)

    @abc.abstractmethod
    def _build(self, config: ModelConfig, settings: SamplingSettings, request: ConfigureEngine) -> None:
        """Make the model, without weights."""

    @abc.abstractmethod
    def _load(self, manifest: Path, weights: Path) -> int:
        """Load a version and return the checksum of what the engine then computes with."""

    @abc.abstractmethod
    def _write(self, prompts: Sequence[Sequence[int]], seeds: Sequence[bytes]) -> list[tuple[list[Written], bytes]]:
        """One group of responses for each prompt, with its activation proofs."""

    def _ready(self) -> tuple[SamplingSettings, Texts]:
        if self._settings is None or self._texts is None or not self._loaded:
            raise LocalError("the engine has no weights yet: configure and load come first")
        return self._settings, self._texts

    def load(self, request: LoadVersion) -> int:
        """Load a version. The caller compares the checksum with the manifest's before it uses the engine."""
        if self._config is None:
            raise LocalError("configure comes before load")
        self._loaded = False
        value = self._load(Path(request.manifest), Path(request.weights))
        self._loaded = True
        return value

    def encode(self, request: EncodePrompts) -> list[bytes]:
        """The prompts' tokens."""
        if self._texts is None or self._settings is None:
            raise LocalError("configure comes before encode")
        most = self._settings.max_prompt_tokens
        return [pack(self._texts.encode(prompt, most)) for prompt in request.prompts]

    def generate(self, request: GenerateGroups) -> WrittenGroups:
        """A group of responses, with proofs, for each prompt and seed."""
        settings, texts = self._ready()
        if len(request.prompts) != len(request.seeds):
            raise LocalError(f"{len(request.prompts)} prompts and {len(request.seeds)} seeds")
        begun = time.perf_counter()
        encoded = [texts.encode(prompt, settings.max_prompt_tokens) for prompt in request.prompts]
        groups = self._write(encoded, request.seeds)
        return WrittenGroups(
            groups=[
                WrittenGroup(
                    prompt=pack(prompt),
                    responses=[
                        WrittenResponse(pack(one.tokens), pack(one.logprobs), one.finish, texts.decode(one.tokens))
                        for one in group
                    ],
                    proofs=proof,
                )
                for prompt, (group, proof) in zip(encoded, groups, strict=True)
            ],
            tokens=sum(len(one.tokens) for group, _ in groups for one in group),
            seconds=time.perf_counter() - begun,
        )

    def benchmark(self, request: Benchmark) -> int:
        """Response tokens a second with the loaded weights, over a few short groups."""
        self._ready()
        assert self._config is not None
        prompts = [[number % self._config.vocabulary for number in range(16)]] * 4
        seeds = [bytes([number]) * 32 for number in range(len(prompts))]
        self._write(prompts[:1], seeds[:1])  # the first pass pays for set-up
        begun = time.perf_counter()
        tokens = sum(len(one.tokens) for group, _ in self._write(prompts, seeds) for one in group)
        return max(1, round(tokens / (time.perf_counter() - begun)))


class TorchEngine(EngineChild):
    """The engine that computes with torch itself, replays and converts as well."""

    convert = staticmethod(convert)

    def __init__(self) -> None:
        super().__init__()
        self._model: LanguageModel | None = None

    def _build(self, config: ModelConfig, settings: SamplingSettings, request: ConfigureEngine) -> None:
        torch.set_num_threads(request.threads)
        dtype = getattr(torch, request.dtype)
        self._model = build(config).to(device=chosen(request.device), dtype=dtype).requires_grad_(False)

    def _load(self, manifest: Path, weights: Path) -> int:
        assert self._model is not None
        return weight_files.load_into(
            self._model, weight_files.map_whole(weight_files.read_manifest(manifest), weights)
        )

    def _write(self, prompts: Sequence[Sequence[int]], seeds: Sequence[bytes]) -> list[tuple[list[Written], bytes]]:
        assert self._model is not None
        assert self._settings is not None
        groups = generate(self._model, prompts, seeds, self._settings)
        return list(zip(groups, build_proofs(groups), strict=True))

    def replay(self, request: ReplayGroups) -> list[ReplayedGroup]:
        """Measure others' groups."""
        settings, texts = self._ready()
        assert self._model is not None
        claims = [
            Claim(
                seed=group.seed,
                prompt=unpack(group.prompt),
                responses=[unpack(tokens) for tokens, _ in group.responses],
                logprobs=[unpack(logprobs) for _, logprobs in group.responses],
                proofs=group.proofs,
            )
            for group in request.groups
        ]
        return [
            ReplayedGroup(found, [texts.decode(response) for response in claim.responses])
            for claim, found in zip(claims, replay(self._model, claims, settings, request.clip), strict=True)
        ]


if __name__ == "__main__":
    child_loop.run(lambda: child_loop.methods(TorchEngine()))
