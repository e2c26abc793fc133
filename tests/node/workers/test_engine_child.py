from __future__ import annotations

import copy
import filecmp
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.errors import UserError
from node.starter.defaults import RECIPE
from node.workers import engine_child
from node.workers.architectures import convert
from node.workers.child_messages import (
    Benchmark,
    ClaimedGroup,
    ConfigureEngine,
    ConvertModel,
    EncodePrompts,
    GenerateGroups,
    LoadVersion,
    ReplayGroups,
    WrittenGroups,
)
from node.workers.child_process import open_worker
from node.workers.engine_child import Claim, Texts, TorchEngine
from node.workers.generation import SamplingSettings, generate, micro
from node.workers.model import CausalLM
from node.workers.model_config import read_config
from node.workers.weight_files import load_into, read_safetensors
from proofs import checks, sampling
from proofs.checks import FLOAT32_THRESHOLDS, GroupReplay
from protocol.errors import LocalError
from protocol.weights.manifest import Manifest
from protocol.work.rollout import MAX_LOGPROB
from tests.node.workers import small
from tests.node.workers.small import QWEN, SETTINGS, STARTER

CLIP = FLOAT32_THRESHOLDS.deficit_clip


def replay(model: CausalLM, claims: Sequence[Claim], settings: SamplingSettings) -> list[GroupReplay]:
    return engine_child.replay(model, claims, settings, CLIP)


def reasons(measured: list[GroupReplay]) -> list[str]:
    """What the checks of tokens, log-probabilities and activations say."""
    assert checks.proofs_parsed(measured)
    return [
        check(measured, FLOAT32_THRESHOLDS)
        for check in (checks.sampling_reason, checks.logprobs_reason, checks.activations_reason)
    ]


def holds(measured: list[GroupReplay]) -> bool:
    return set(reasons(measured)) == {"ok"}


def exact(measured: list[GroupReplay]) -> bool:
    return all(
        (found.mismatches, found.deficit_sum, found.activation_mismatches) == (0, 0, 0)
        and found.logprob_error_max < 100
        for found in measured
    )


@pytest.fixture(scope="module")
def starter() -> CausalLM:
    made = CausalLM(read_config(STARTER / "config.json"))
    load_into(made, read_safetensors(STARTER))
    return made


@pytest.fixture(scope="module")
def starter_prompts(starter: CausalLM) -> list[list[int]]:
    texts = Texts(STARTER / "tokenizer.json", starter.config)
    generator = random.Random(3)
    words = "State the final answer to the following arithmetic problem: {} {} {} ="
    return [
        texts.encode(words.format(generator.randint(10, 99), generator.choice("+-"), generator.randint(10, 99)), 64)
        for _ in range(16)
    ]


@pytest.mark.parametrize("raw", [QWEN, small.LLAMA])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_what_is_generated_replays_exactly(
    tmp_path: Path, raw: dict[str, Any], temperature: float, min_p: float
) -> None:
    made = small.model(small.config(tmp_path, raw))
    settings = replace(SETTINGS, temperature=temperature, min_p=min_p)
    claims = small.written(made, small.prompts(made.config, 9), settings)
    assert exact(replay(made, claims, settings))
    ends = [response[-1] == 1 for claim in claims for response in claim.responses]
    assert any(ends)
    assert not all(ends)
    for claim in claims:
        for response in claim.responses:
            assert response[-1] == 1 or len(response) == 6
            assert 1 not in response[:-1]


def test_a_result_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    prompts, noise = small.prompts(made.config, 7), small.seeds(7)
    together = generate(made, prompts, noise, SETTINGS)
    reverse = generate(made, prompts[::-1], noise[::-1], SETTINGS)[::-1]
    alone = [
        group
        for prompt, seed in zip(prompts, noise, strict=True)
        for group in generate(made, [prompt], [seed], SETTINGS)
    ]
    in_parts = generate(made, prompts, noise, SETTINGS, most=8)  # two groups at a time
    for other in (reverse, alone, in_parts):
        for group, same in zip(together, other, strict=True):
            assert [one.tokens for one in group] == [one.tokens for one in same]
            for one, two in zip(group, same, strict=True):
                assert max(abs(a - b) for a, b in zip(one.logprobs, two.logprobs, strict=True)) < 100
    claims = small.claims(prompts, noise, together)
    singly = [replay(made, [claim], SETTINGS)[0] for claim in claims]
    assert exact(singly)
    assert [found.tokens for found in singly] == [found.tokens for found in replay(made, claims, SETTINGS)]


def test_generation_by_the_plain_definition(tmp_path: Path) -> None:
    """One response, token by token with whole forward passes and the noise's public functions."""
    made = small.model(small.config(tmp_path))
    prompt, seed = [4, 9, 33], b"\7" * 32
    (group,) = generate(made, [prompt], [seed], SETTINGS)
    for number, one in enumerate(group):
        line: list[int] = []
        while not line or (line[-1] != 1 and len(line) < 6):
            tokens = torch.tensor([prompt + line])
            slots = tokens.shape[1]
            mask = torch.ones((slots, slots), dtype=torch.bool).tril()[None, None]
            with torch.no_grad():
                hidden = made(tokens, torch.arange(slots)[None], mask)[0, -1:]
                logits = made.logits(hidden)
            keys = sampling.keys_tensor([(seed, number, len(line))])
            torch.testing.assert_close(torch.from_numpy(one.states[len(line)]), hidden[0], rtol=1e-4, atol=1e-5)
            line.append(int(sampling.choose(logits, keys, 1.0)))
            logprob = float(sampling.logprobs(logits, torch.tensor(line[-1:]), 1.0))
            assert one.logprobs[len(line) - 1] == pytest.approx(-logprob * 1e6, abs=50)
        assert one.tokens == line
        assert one.finish == int(line[-1] == 1)


def test_the_starter_model_replays_exactly(starter: CausalLM, starter_prompts: list[list[int]]) -> None:
    settings = SamplingSettings.of(RECIPE, starter.config)
    measured = replay(starter, small.written(starter, starter_prompts, settings), settings)
    assert exact(measured)
    assert holds(measured)


def test_perturbed_weights_are_flagged(starter: CausalLM, starter_prompts: list[list[int]]) -> None:
    """Noise of 5 % of each tensor's standard deviation, as ``--cheat wrong-weights`` has it."""
    settings = SamplingSettings.of(RECIPE, starter.config)
    generator = torch.Generator().manual_seed(11)
    cheat = CausalLM(starter.config)
    cheat.load_state_dict(starter.state_dict())
    with torch.no_grad():
        for parameter in cheat.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.05)
    measured = replay(starter, small.written(cheat, starter_prompts, settings), settings)
    assert reasons(measured) == ["sampling", "logprobs", "activations"]
    assert reasons(measured[:1]) == ["sampling", "logprobs", "activations"]


def test_other_forgeries_are_flagged(starter: CausalLM, starter_prompts: list[list[int]]) -> None:
    settings = SamplingSettings.of(RECIPE, starter.config)
    claims = small.written(starter, starter_prompts, settings)
    another_seed = [replace(claim, seed=b"\xff" * 32) for claim in claims]
    assert reasons(replay(starter, another_seed, settings)) == ["sampling", "ok", "ok"]
    swapped = [
        replace(claim, proofs=other.proofs) for claim, other in zip(claims, claims[1:] + claims[:1], strict=True)
    ]
    found = replay(starter, swapped, settings)
    assert not checks.proofs_parsed(found) or reasons(found) == ["ok", "ok", "activations"]
    (empty,) = replay(starter, [replace(claims[0], proofs=b"")], settings)
    assert empty.activation_values == 0
    boast = [[0] * len(line) for line in claims[0].logprobs]
    (found_boast,) = replay(starter, [replace(claims[0], logprobs=boast)], settings)
    assert found_boast.logprob_error_max == pytest.approx(max(map(max, claims[0].logprobs)), abs=100)


def test_a_token_chosen_by_hand_stands_out(starter: CausalLM, starter_prompts: list[list[int]]) -> None:
    settings = SamplingSettings.of(RECIPE, starter.config)
    claim = small.written(starter, starter_prompts[:1], settings)[0]
    lines = [list(line) for line in claim.responses]
    number = max(range(len(lines)), key=lambda index: len(lines[index]))
    lines[number] = [settings.end_token]
    forged = replace(claim, responses=lines, logprobs=[[0] * len(line) for line in lines])
    (found,) = replay(starter, [forged], settings)
    assert found.mismatches == 1
    assert found.deficit_max > 4 * FLOAT32_THRESHOLDS.logprob_error
    assert checks.sampling_reason([found], FLOAT32_THRESHOLDS) == "sampling"


def test_broken_weights_let_nobody_pass(starter: CausalLM, starter_prompts: list[list[int]]) -> None:
    settings = SamplingSettings.of(RECIPE, starter.config)
    claims = small.written(starter, starter_prompts[:1], settings)
    broken = copy.deepcopy(starter)
    with torch.no_grad():
        next(broken.parameters())[0, 0] = float("nan")
    with pytest.raises(LocalError, match="not finite"):
        replay(broken, claims, settings)


def test_bfloat16_generation_gives_bits(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path)).to(torch.bfloat16)
    claims = small.written(made, small.prompts(made.config, 3))
    found = replay(made, claims, SETTINGS)
    assert sum(one.mismatches for one in found) <= 2
    assert all(one.activation_values > 0 for one in found)


def test_texts(tmp_path: Path, starter: CausalLM) -> None:
    texts = Texts(STARTER / "tokenizer.json", starter.config)
    tokens = texts.encode("42 - 25 =", 64)
    assert len(tokens) == 6
    assert texts.encode("42 - 25 =", 2) == tokens[:2]
    assert texts.encode("", 64) == [1]
    assert texts.decode([tokens[2], tokens[0], tokens[1], 1]) == "-42"
    assert texts.decode([1]) == ""
    assert texts.decode([tokens[0], 0, tokens[1]]) == "4<pad>2"
    with pytest.raises(UserError, match=r"cannot read the tokenizer .*nothing.json"):
        Texts(tmp_path / "nothing.json", starter.config)
    with pytest.raises(UserError, match="more tokens than the model's vocabulary"):
        Texts(STARTER / "tokenizer.json", small.config(tmp_path, {**QWEN, "vocab_size": 5}))


def version(directory: Path) -> tuple[LoadVersion, int]:
    """The starter model's version 0, and its checksum."""
    manifest, whole = directory / "manifest", directory / "whole"
    found = convert(ConvertModel(str(STARTER), str(whole)))
    manifest.write_bytes(Manifest.of_file(found.tensors, whole.read_bytes(), found.checksum).encode())
    return LoadVersion(str(manifest), str(whole)), found.checksum


def test_operations_in_the_wrong_order_are_refused() -> None:
    made = TorchEngine()
    with pytest.raises(LocalError, match="configure comes before load"):
        made.load(LoadVersion("manifest", "weights"))
    with pytest.raises(LocalError, match="configure comes before encode"):
        made.encode(EncodePrompts(["x"]))
    made.configure(ConfigureEngine(str(STARTER / "config.json"), str(STARTER / "tokenizer.json"), RECIPE))
    with pytest.raises(LocalError, match="no weights yet"):
        made.generate(GenerateGroups(["x"], [b"\0" * 32]))
    with pytest.raises(LocalError, match="no weights yet"):
        made.replay(ReplayGroups([], CLIP))
    with pytest.raises(LocalError, match="no weights yet"):
        made.benchmark(Benchmark())


def claims_of(written: WrittenGroups, noise: Sequence[bytes]) -> ReplayGroups:
    """The request to replay what an engine wrote."""
    groups = [
        ClaimedGroup(seed, group.prompt, [(one.tokens, one.logprobs) for one in group.responses], group.proofs)
        for group, seed in zip(written.groups, noise, strict=True)
    ]
    return ReplayGroups(groups, CLIP)


async def test_the_child_through_the_real_client(tmp_path: Path) -> None:
    prompts = [f"State the final answer to the following arithmetic problem: {a} + 17 =" for a in range(10, 18)]
    noise = small.seeds(len(prompts))
    async with open_worker("node.workers.engine_child", name="engine") as worker:
        output = str(tmp_path / "from-child")
        converted = await worker.call(ConvertModel(str(STARTER), output), timeout=60)
        load, checksum = version(tmp_path)
        assert filecmp.cmp(output, load.weights, shallow=False)
        ready = await worker.call(ConfigureEngine(converted.config, converted.tokenizer, RECIPE), timeout=60)
        assert ready.end_token == 1
        assert await worker.call(load, timeout=60) == converted.checksum == checksum
        made = await worker.call(GenerateGroups(prompts, noise), timeout=60)
        assert [group.prompt for group in made.groups] == await worker.call(EncodePrompts(prompts), timeout=60)
        assert made.tokens == sum(len(one.tokens) // 4 for group in made.groups for one in group.responses)
        assert all(len(group.responses) == RECIPE.group_size for group in made.groups)
        again = await worker.call(claims_of(made, noise), timeout=60)
        assert exact([group.found for group in again])
        assert [group.texts for group in again] == [[one.text for one in group.responses] for group in made.groups]
        assert await worker.call(Benchmark(), timeout=60) > 0


def test_a_log_probability_is_negated_rounded_and_bounded() -> None:
    found = micro(torch.tensor([-1.2345678, 0.0, -1e-9, -250.0, -torch.inf]))
    assert found.tolist() == [1_234_568, 0, 0, MAX_LOGPROB, MAX_LOGPROB]
