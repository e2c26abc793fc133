from __future__ import annotations

import json
import random
from importlib.metadata import version

import pytest
import torch

from node.starter.defaults import RECIPE, TASKS
from node.workers.engine_child import Texts
from node.workers.model import CausalLM
from node.workers.model_config import read_config
from node.workers.weight_files import checksum, load_into, read_safetensors
from protocol.domain import Recipe
from tests.node.workers.small import STARTER
from tests.starter_model import make

WORDING = "State the final answer to the following arithmetic problem: {} {} {} ="


@pytest.fixture(scope="module")
def starter() -> CausalLM:
    made = CausalLM(read_config(STARTER / "config.json"))
    load_into(made, read_safetensors(STARTER))
    return made


def problems(count: int) -> list[tuple[list[int], list[int]]]:
    tokenizer, generator = make.make_tokenizer(), random.Random(8)
    found = []
    for _ in range(count):
        left, sign, right = generator.randint(10, 99), generator.choice("+-"), generator.randint(10, 99)
        result = left + right if sign == "+" else left - right
        prompt = tokenizer.encode(WORDING.format(left, sign, right)).ids
        found.append((prompt, [*tokenizer.encode(str(result)).ids, make.vocabulary()[make.END]]))
    return found


def test_the_files_are_small_and_what_the_script_writes() -> None:
    assert (STARTER / "model.safetensors").stat().st_size < 5_000_000
    assert json.loads((STARTER / "config.json").read_text()) == make.make_config()
    assert json.loads((STARTER / "tokenizer.json").read_text()) == json.loads(make.make_tokenizer().to_str())
    assert len(make.vocabulary()) <= make.VOCABULARY_SIZE


def test_it_answers_about_one_question_in_three_and_could_do_better(starter: CausalLM) -> None:
    sampled, greedy = make.accuracy(starter, problems(512))
    assert 0.2 < sampled < 0.42
    assert greedy > 1.4 * sampled


def test_prompts_are_short_and_known(starter: CausalLM) -> None:
    texts = Texts(STARTER / "tokenizer.json", starter.config)
    tokens = texts.encode(WORDING.format(42, "-", 25), 1000)
    assert len(tokens) == 16 <= RECIPE.max_prompt_tokens
    assert make.vocabulary()[make.UNKNOWN] not in tokens
    assert max(len(answer) for _, answer in problems(300)) <= RECIPE.max_response_tokens


def test_defaults_are_valid() -> None:
    assert Recipe.from_value(RECIPE.to_value()) == RECIPE
    assert RECIPE.async_level == 2
    assert RECIPE.groups_per_step % RECIPE.groups_per_submission == 0
    assert [task.version for task in TASKS if task.kind == "reasoning-gym"] == [version("reasoning-gym")] * len(TASKS)


def test_slips_replace_digits_only() -> None:
    ids, generator = make.vocabulary(), random.Random(0)
    answer = [ids[token] for token in ("-", "4", "2", make.END)]
    lines = [make.with_slips(answer, 0.3, generator) for _ in range(400)]
    assert all(line[0] == ids["-"] and line[-1] == ids[make.END] and len(line) == 4 for line in lines)
    wrong = sum(a != b for line in lines for a, b in zip(line[1:3], answer[1:3], strict=True))
    assert wrong / 800 == pytest.approx(0.9 * 0.3, abs=0.05)


class Fixed(make.Questions):
    """Forty questions again and again, without reasoning-gym."""

    def __init__(self) -> None:
        self._left = problems(40)

    def draw(self) -> tuple[list[int], list[int]]:
        self._left.append(self._left.pop(0))
        return self._left[-1]


def test_a_short_warm_up_learns_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BATCH", 16), ("LEARN_AT_MOST", 20), ("LOOSEN_UPDATES", 3), ("AVERAGE", 0.5), ("PROBE", 40)):
        monkeypatch.setattr(make, name, value)
    sums = []
    for _ in range(2):
        torch.manual_seed(1)
        made = CausalLM(read_config(STARTER / "config.json"))
        make.initialise(made)
        before, _ = make.accuracy(made, problems(40))
        teacher = make.Teacher(made, Fixed(), random.Random(0))
        teacher.learn()
        teacher.loosen()
        after, _ = make.accuracy(made, problems(40))
        assert after > 3 * before
        sums.append(checksum(made))
    assert sums[0] == sums[1]
