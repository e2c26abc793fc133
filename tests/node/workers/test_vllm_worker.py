"""What runs inside vLLM's workers, without an engine: both adapters of the sampler, refusals, sums over ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from proofs import sampling
from tests.node.workers.vllm_child import INSTALLED, REASON
from tests.protocol.builders import digest

pytestmark = [
    pytest.mark.slow,  # importing vLLM takes long
    pytest.mark.skipif(not INSTALLED, reason=REASON),
    pytest.mark.filterwarnings("ignore"),
]

VOCABULARY, HIDDEN = 60, 4


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    from node.workers import vllm_worker

    monkeypatch.setattr(vllm_worker, "_recorder", vllm_worker.Recorder())
    return vllm_worker


def params(worker: Any, response: int, **change: Any) -> Any:
    from vllm import SamplingParams

    extra = {"id": str(response), "seed": digest("s").hex(), "response": response, "temperature": 0.8, "min_p": 0.02}
    return SamplingParams(temperature=0.0, extra_args={worker.EXTRA: extra}, **change)


def see(worker: Any, rows: int, number: int) -> tuple[Tensor, Tensor]:
    """Logits and the states that the hook is shown before them."""
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn(rows, HIDDEN, generator=generator)
    worker._recorder.see(torch.nn.Identity(), (None, hidden))
    return torch.randn(rows, VOCABULARY, generator=generator) * 3, hidden


def chosen(logits: Tensor, places: list[tuple[int, int]]) -> list[int]:
    keys = sampling.keys_tensor((digest("s"), response, position) for response, position in places)
    found: list[int] = sampling.choose(logits, keys, 0.8, 0.02).tolist()
    return found


def update(size: int, removed: Any = (), added: Any = (), moved: Any = ()) -> Any:
    from vllm.v1.sample.logits_processor import BatchUpdate

    return BatchUpdate(batch_size=size, removed=removed, added=added, moved=moved)


def made_v1(worker: Any) -> Any:
    return worker.SamplerV1(SimpleNamespace(speculative_config=None), torch.device("cpu"), False)


def test_v1_follows_the_persistent_batch(worker: Any) -> None:
    from vllm.v1.sample.logits_processor import MoveDirectionality

    sampler = made_v1(worker)
    assert not sampler.is_argmax_invariant()
    written: list[list[int]] = [[], [], []]
    sampler.update_state(update(3, added=[(i, params(worker, i), None, written[i]) for i in range(3)]))
    logits, hidden = see(worker, 3, 0)
    expected = chosen(logits, [(0, 0), (1, 0), (2, 0)])
    assert sampler.apply(logits).argmax(dim=1).tolist() == expected
    for line, token in zip(written, expected, strict=True):
        line.append(token)
    # Request 1 ends, 2 takes its place and then changes places with 0; 0 is one token ahead of 2.
    written[0].append(9)
    swap = [(2, 1, MoveDirectionality.UNIDIRECTIONAL), (0, 1, MoveDirectionality.SWAP)]
    sampler.update_state(update(2, removed=[1], moved=swap))
    sampler.update_state(None)
    logits, later = see(worker, 2, 1)
    following = chosen(logits, [(2, 1), (0, 2)])
    assert sampler.apply(logits).argmax(dim=1).tolist() == following
    tokens, logprobs, states = worker._recorder.take("2", 2)
    assert tokens == [expected[2], following[0]]
    assert all(value <= 0 for value in logprobs)
    assert torch.equal(torch.from_numpy(states), torch.stack([hidden[2], later[0]]))


def test_the_last_write_wins(worker: Any) -> None:
    """As after a preemption: the same place comes again, from other floats."""
    sampler = made_v1(worker)
    sampler.update_state(update(1, added=[(0, params(worker, 0), None, [])]))
    for number in range(3):
        logits, hidden = see(worker, 1, number)
        expected = chosen(logits, [(0, 0)])
        sampler.apply(logits)
    assert worker._recorder.rewritten == 2
    tokens, _, states = worker._recorder.take("0", 1)
    assert tokens == expected
    assert torch.equal(torch.from_numpy(states), hidden)
    assert worker._recorder.records == {}


def test_v2_chooses_the_same_and_leaves_unread_prompts_alone(worker: Any) -> None:
    states = SimpleNamespace(prompt_len=SimpleNamespace(gpu=torch.tensor([0, 5, 0, 8])))
    sampler = worker.SamplerV2(SimpleNamespace(speculative_config=None), states)
    assert sampler.add_request(3, params(worker, 0))
    assert sampler.add_request(1, params(worker, 1))
    logits, hidden = see(worker, 2, 4)
    before = logits.clone()
    # Slot 3 has written two tokens: its row stands at 8 + 2 − 1. Slot 1 is still inside its prompt.
    where = SimpleNamespace(expanded_idx_mapping=torch.tensor([3, 1]), pos=torch.tensor([9, 3]))
    after = sampler.apply(logits, where)
    assert after[:1].argmax(dim=1).tolist() == chosen(before[:1], [(0, 2)])
    assert torch.equal(after[1], before[1])
    assert list(worker._recorder.records) == ["0"]
    assert torch.equal(worker._recorder.records["0"].states[2], hidden[0])


def test_states_of_another_step_are_an_error(worker: Any) -> None:
    sampler = made_v1(worker)
    sampler.update_state(update(2, added=[(i, params(worker, i), None, []) for i in range(2)]))
    see(worker, 3, 0)
    with pytest.raises(Exception, match="do not belong to these logits"):
        sampler.apply(torch.zeros(2, VOCABULARY))


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"bad_words": ["no"]},
        {"min_tokens": 3},
    ],
)
def test_what_would_change_the_choice_is_refused(worker: Any, change: dict[str, Any]) -> None:
    wrong = params(worker, 0, **change)
    for adapter in (worker.SamplerV1, worker.SamplerV2):
        with pytest.raises(ValueError, match=f"{next(iter(change))} cannot be used"):
            adapter.validate_params(wrong)


def test_others_requests_and_drafts_are_refused(worker: Any) -> None:
    from vllm import SamplingParams

    worker.SamplerV1.validate_params(params(worker, 0))
    with pytest.raises(ValueError, match="without the protocol's arguments"):
        worker.SamplerV1.validate_params(SamplingParams(temperature=0.0))
    drafts = SimpleNamespace(speculative_config=object())
    with pytest.raises(ValueError, match="speculative decoding"):
        worker.SamplerV1(drafts, torch.device("cpu"), False)
    with pytest.raises(ValueError, match="speculative decoding"):
        worker.SamplerV2(drafts, None)


def test_copies_count_once_and_shards_add_up(worker: Any) -> None:
    assert worker.total([{"norm": 5, "q": 7}]) == 12
    assert worker.total([{"norm": 5, "q": 7}, {"norm": 5, "q": 9}]) == 21


def test_weights_and_their_packed_form_must_agree(worker: Any) -> None:
    """The packed form of a kept weight counts by its difference, that of a dropped one by itself."""
    model = torch.nn.Module()
    model.kept = torch.nn.Linear(4, 4, bias=False)
    plain = worker.sums(model)
    model.kept.farflung_sum = plain["kept.weight"]
    assert worker.total([worker.sums(model)]) == plain["kept.weight"]
    with torch.no_grad():
        model.kept.weight.add_(1.0)
    assert worker.total([worker.sums(model)]) == plain["kept.weight"]  # what it computes with is the old one
    model.kept.weight = torch.nn.Parameter(torch.empty(0))
    assert worker.total([worker.sums(model)]) == plain["kept.weight"]
