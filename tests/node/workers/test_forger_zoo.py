"""The forger zoo against the starter model: everybody is caught, honest engines are not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from node.workers import forger_zoo
from node.workers.calibration_child import Wide, rounding
from node.workers.model import CausalLM
from proofs.checks import FLOAT32_THRESHOLDS
from tests.bench import forgers
from tests.bench.gather import Bench, gather, subject


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Bench(subject("starter", None))
    torch.set_num_threads(threads)


def rows(bench: Bench, forger: forger_zoo.Forger, count: int) -> list[dict[str, Any]]:
    found = gather(bench, 0, count, [forger.name], {})
    return [row for row in islice(found, 40) if row["kind"] == forger.name]


@pytest.mark.parametrize("forger", forger_zoo.ZOO, ids=lambda forger: forger.name)
def test_every_forger_is_caught(bench: Bench, forger: forger_zoo.Forger) -> None:
    slow = forger.name == "int8 weights + prefill"  # one token in five hundred, and nothing else
    found = forgers.judged(rows(bench, forger, 12 if slow else 1), FLOAT32_THRESHOLDS)
    assert found["submissions_until_caught"] is not None
    if slow:
        assert found["reason"] in ("drift", "sampling")
        assert found["accepted_before"] >= 1


def test_honest_engines_are_accepted(bench: Bench) -> None:
    made = list(gather(bench, 16, 0, (), {}))
    assert len(made) == 16
    found = forgers.honest(made, FLOAT32_THRESHOLDS, 50)
    assert (found["false_positives"], found["resampled_false_positives"]) == (0, 0)
    assert not found["convicted_in_a_row"]
    assert found["honest_by_engine"].keys() <= {"ours", "transformers"}
    # What was made already is not made again.
    assert list(gather(bench, 16, 0, (), {"honest": 16})) == []


def test_cheaper_weights_are_cheaper_and_near(bench: Bench) -> None:
    model = bench.laboratory.model
    right = dict(model.named_parameters())
    for bits, distance in ((8, 0.01), (4, 0.2)):
        made = forger_zoo.quantised(model, bits)
        for name, parameter in made.named_parameters():
            change = (parameter - right[name]).norm() / right[name].norm()
            assert float(change) < distance
            if parameter.dim() == 2:
                assert float(change) > 0
                line = parameter[0] if bits == 8 else parameter.reshape(-1, 32)[0]
                assert len(set(line.tolist())) <= 2**bits - 1
            else:
                assert float(change) == 0
    assert forger_zoo.smaller(model).config.layers == 2
    assert model.config.layers == 3


def test_versions_differ_by_the_learning_rate(bench: Bench) -> None:
    stage = bench.laboratory.stage
    near, far = (
        sum(float((a - b).norm()) for a, b in zip(old.parameters(), stage.model.parameters(), strict=True))
        for old in map(stage.weights, ("v-1", "v-3"))
    )
    assert 0 < near < far


def test_bfloat16_with_wide_products_rounds_as_bfloat16_does(bench: Bench) -> None:
    model = bench.laboratory.judge
    assert isinstance(model, CausalLM)
    made, native = rounding(model), copy.deepcopy(model).to(torch.bfloat16)
    assert sum(isinstance(module, Wide) for module in made.modules()) == 21
    tokens = torch.tensor([[5, 9, 20, 7]])
    mask = torch.ones((1, 1, 4, 4), dtype=torch.bool).tril()
    with torch.inference_mode():
        one, other = (m.logits(m(tokens, torch.arange(4)[None], mask)) for m in (made, native))
        exact = model.logits(model(tokens, torch.arange(4)[None], mask))
    noise = float((native_error := (other - exact)).std())
    assert float((one - exact).std()) == pytest.approx(noise, rel=0.6)
    assert float((one - other).abs().max()) < 6 * float(native_error.abs().max())
    assert torch.equal(one, one.bfloat16().float())


def test_a_job_has_the_protocols_seeds() -> None:
    made = forger_zoo.job([(1,), (2,)], "a", 4)
    assert len(set(made.seeds)) == 2
    assert made.seeds == forger_zoo.job([(7,)] * 6, "a", 0).seeds[4:]
    assert made.seeds[0] != forger_zoo.job([(1,)], "b", 4).seeds[0]
    assert replace(made, first=0).prompts == made.prompts
