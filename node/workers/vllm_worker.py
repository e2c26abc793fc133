"""What runs inside vLLM's worker processes: the protocol's sampler, the states that proofs need, loading and checksums.

1. vLLM samples greedily. Before it does, our processor chooses each row's token by ``proofs.race`` and raises that
   token's logit above all others. It also keeps the log-probability and the hidden state that belong to the choice.
2. Everything is kept by (request, position) and the last write wins: chunked prefill, preemption and warm-up emit rows
   whose token is thrown away, and the one that counts comes last.
3. Weights are loaded from the mapped whole file; vLLM splits and fuses them. The checksum is taken over what its layers
   then hold. On a CPU vLLM packs a linear layer's weights into a form that cannot be read back and drops the
   original, so the sum is taken as they are handed to the packer: a layer that was skipped keeps its old sum. Its
   reload forgets the packed form of a tied output layer; that is made again.
4. Several tensor-parallel ranks all sample, and agree, because the logits are gathered; rank 0 reports. A tensor whose
   sum is the same on all ranks is a copy and counts once, others are shards.

Model runner V1 is what runs (``VLLM_USE_V2_MODEL_RUNNER=0``); V2's adapter differs in how it names rows and positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import vllm.model_executor.layers.utils as vllm_layers
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as V1Processor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2Processor

from node.workers import weight_files
from node.workers.generation import states_array
from proofs import race, sampling
from proofs.checksum import value_sum
from protocol.errors import LocalError

EXTRA: Final = "farflung"
"""The key of our arguments among a request's ``extra_args``: id, seed (hexadecimal), response, temperature, min_p."""

_ABOVE_ALL: Final = torch.finfo(torch.float32).max
_PACKED_SUM: Final = "farflung_sum"


@dataclass(frozen=True, slots=True)
class NoisePlace:
    """Whose row it is: our request id, and what its noise and scores depend on."""

    id: str
    seed: bytes
    response: int
    temperature: float
    min_p: float

    @classmethod
    def of(cls, params: Any) -> NoisePlace:
        """The place that a request's sampling parameters carry. Raises ``ValueError`` for a request not ours."""
        extra = (params.extra_args or {}).get(EXTRA)
        if extra is None:
            raise ValueError("a request without the protocol's arguments cannot be sampled here")
        return cls(extra["id"], bytes.fromhex(extra["seed"]), extra["response"], extra["temperature"], extra["min_p"])


@dataclass(slots=True)
class ChoiceRecord:
    """What was chosen for one request, by position."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, float] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)


class Recorder:
    """The one noise kernel's caller and keeper of what proofs need, whatever names rows and positions."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.records: dict[str, ChoiceRecord] = {}
        self.rewritten = 0

    def see(self, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """A forward pre-hook of the layer that makes logits: (head, hidden states [rows, hidden])."""
        self.hidden = arguments[1]

    def choose(self, logits: Tensor, rows: Sequence[tuple[int, NoisePlace, int]]) -> Tensor:
        """Choose for ``rows`` of (row, place, position) of ``logits`` [n, V]; the rest stays as it is."""
        hidden = self.hidden
        if hidden is None or hidden.shape[0] != logits.shape[0]:
            raise LocalError("the hidden states do not belong to these logits")
        if not rows:
            return logits
        # All requests come from one recipe.
        first = rows[0][1]
        numbers = [row for row, _, _ in rows]
        every = numbers == list(range(logits.shape[0]))
        keys = sampling.keys_tensor((place.seed, place.response, position) for _, place, position in rows)
        index = torch.tensor(numbers, device=logits.device)
        table = logits if every else logits[index]
        tokens, logprobs = race.sample(table, keys.to(logits.device), first.temperature, first.min_p)
        logits[index, tokens] = _ABOVE_ALL
        states = (hidden if every else hidden[index]).detach().to("cpu").unbind()
        for (_, place, position), token, logprob, state in zip(
            rows, tokens.tolist(), logprobs.tolist(), states, strict=True
        ):
            record = self.records.get(place.id)
            if record is None:
                record = self.records[place.id] = ChoiceRecord()
            self.rewritten += position in record.tokens
            record.tokens[position] = token
            record.logprobs[position] = logprob
            record.states[position] = state
        return logits

    def take(self, id: str, count: int) -> tuple[list[int], list[float], NDArray[Any]]:
        """The first ``count`` positions' tokens, log-probabilities and states [count, hidden]; they are forgotten."""
        record = self.records.pop(id)
        places = range(count)
        return (
            [record.tokens[place] for place in places],
            [record.logprobs[place] for place in places],
            states_array(torch.stack([record.states[place] for place in places])),
        )


_recorder = Recorder()
"""This process' own: vLLM makes the processor and the worker apart from each other."""


def refuse_others(params: Any) -> None:
    """Raise ``ValueError`` for sampling parameters that would change what the protocol chose."""
    NoisePlace.of(params)
    wrong = {
        "n": params.n != 1,
        "temperature": params.temperature != 0,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "repetition_penalty": params.repetition_penalty != 1,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens != 0,
        "structured_outputs": params.structured_outputs is not None,
    }
    for name, found in wrong.items():
        if found:
            raise ValueError(f"{name} cannot be used: the protocol's own noise chooses the tokens")


def _refuse_drafts(config: Any) -> None:
    if config.speculative_config is not None:
        raise ValueError("speculative decoding cannot be used: the protocol's own noise chooses the tokens")


class SamplerV1(V1Processor):  # type: ignore[misc]
    """Model runner V1: a row is an index of the persistent batch, a position is how many tokens were written."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """See ``refuse_others``."""
        refuse_others(sampling_params)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        _refuse_drafts(vllm_config)
        self.rows: dict[int, tuple[NoisePlace, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """It decides the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the persistent batch: removed, added, moved, in this order."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, _, written in batch_update.added:
            self.rows[index] = (NoisePlace.of(params), written)
        for source, target, how in batch_update.moved:
            one, other = self.rows.pop(source, None), self.rows.pop(target, None)
            if one is not None:
                self.rows[target] = one
            if other is not None and how is MoveDirectionality.SWAP:
                self.rows[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        """Choose a token for every row."""
        rows = [(row, *self.rows[row]) for row in range(logits.shape[0])]
        return _recorder.choose(logits, [(row, place, len(written)) for row, place, written in rows])


class SamplerV2(V2Processor):  # type: ignore[misc]
    """Model runner V2: a row names its request's slot, a position follows from where the row stands."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """See ``refuse_others``."""
        refuse_others(sampling_params)

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        _refuse_drafts(vllm_config)
        self.states = req_states
        self.slots: dict[int, NoisePlace] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """A request takes a slot, and with it the place of whoever had it."""
        self.slots[req_idx] = NoisePlace.of(sampling_params)
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Choose a token for every row but those of prompts that are not yet read to their end."""
        slots = ctx.expanded_idx_mapping
        positions = ctx.pos + 1 - self.states.prompt_len.gpu[slots]
        rows = [
            (row, self.slots[slot], position)
            for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True))
            if position >= 0
        ]
        return _recorder.choose(logits, rows)


class WorkerExtension:
    """Methods that vLLM mixes into its worker; called over ``collective_rpc``, so on every rank."""

    rank: int
    model_runner: Any

    def farflung_attach(self) -> None:
        """Keep the hidden states that logits are made of."""
        self.model_runner.get_model().logits_processor.register_forward_pre_hook(_recorder.see)

    def farflung_load(self, manifest: str, whole: str) -> dict[str, int]:
        """Load a version in place; the sums of the terms of the checksum by name of the tensors that now lie here."""
        tensors = weight_files.map_whole(weight_files.read_manifest(Path(manifest)), Path(whole))
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        model = self.model_runner.get_model()
        pack_again(model)
        return sums(model)

    def farflung_take(
        self, wanted: Sequence[tuple[str, int]]
    ) -> list[tuple[list[int], list[float], NDArray[Any]]] | None:
        """What was recorded of requests, given as (id, tokens), on rank 0; None elsewhere. All forget it."""
        found = [_recorder.take(id, count) for id, count in wanted]
        return found if self.rank == 0 else None

    def farflung_rewritten(self) -> int:
        """How many places were chosen for again."""
        return _recorder.rewritten


def sums(model: nn.Module) -> dict[str, int]:
    """The checksum's terms, added up for each tensor that the model computes with; tied ones appear once.

    Where a layer keeps its weights beside their packed form, what the two differ by counts as well: nothing, if the
    packed form is made of these weights.
    """
    found = {name: value_sum([parameter.detach()]) for name, parameter in model.named_parameters()}
    for name, module, packed in _packed(model):
        kept = module.weight.numel() > 0
        found[f"{name}.packed"] = packed - value_sum([module.weight.detach()]) if kept else packed
    return found


def _packed(model: nn.Module) -> list[tuple[str, Any, int]]:
    modules = [(name, module) for name, module in model.named_modules() if hasattr(module, _PACKED_SUM)]
    return [(name, module, getattr(module, _PACKED_SUM)) for name, module in modules]


def pack_again(model: nn.Module) -> None:
    """Pack what a reload forgot: vLLM 0.32 leaves a tied output layer with the packed form of the old weights."""
    for _, module, packed in _packed(model):
        if module.weight.numel() > 0 and packed != value_sum([module.weight.detach()]):
            _sum_and_pack(module, remove_weight=False)


def total(ranks: Sequence[dict[str, int]]) -> int:
    """The sum over all ranks (rule 4), to be reduced by ``proofs.checksum.checksum_of_sums``."""
    result = 0
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        result += parts[0] if len(set(parts)) == 1 else sum(parts)
    return result


_pack = vllm_layers.dispatch_cpu_unquantized_gemm


def _sum_and_pack(layer: Any, remove_weight: bool) -> None:
    if not layer.weight.is_meta:
        setattr(layer, _PACKED_SUM, value_sum([layer.weight]))
    _pack(layer, remove_weight)


# Before vLLM builds a model: it looks the function up at each call.
vllm_layers.dispatch_cpu_unquantized_gemm = _sum_and_pack
