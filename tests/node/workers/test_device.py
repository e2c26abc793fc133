"""Children compute on a GPU where there is one: told without one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from node.workers import device, engine_child, sharding, trainer_child
from node.workers.generation import Settings
from node.workers.model import CausalLM, read_config
from node.workers.sharding import Group
from tests.node.workers.small import STARTER
from tests.protocol.builders import RECIPE


@pytest.mark.parametrize(("there", "found"), [(True, "cuda"), (False, "cpu")])
def test_a_gpu_is_taken_where_torch_has_one(monkeypatch: pytest.MonkeyPatch, there: bool, found: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert device.chosen("auto") == found
    assert device.chosen("cpu") == "cpu"
    assert device.chosen("cuda:1") == "cuda:1"


@pytest.mark.parametrize(("there", "found"), [(True, "cuda"), (False, "cpu")])
def test_a_trainer_of_one_process_takes_it(monkeypatch: pytest.MonkeyPatch, there: bool, found: str) -> None:
    seen: list[str] = []

    def alone(where: str, *, sharded: bool) -> Group:
        seen.append(where)
        return Group(0, 1, torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(sharding, "alone", alone)
    # As the role configures it: see ``node.roles.trainer``.
    trainer_child.Trainer().configure(config=str(STARTER / "config.json"), recipe=asdict(RECIPE), dtype="float32")
    assert seen == [found]


@pytest.mark.parametrize(("there", "found"), [(True, "cuda"), (False, "cpu")])
def test_an_engine_takes_it(monkeypatch: pytest.MonkeyPatch, there: bool, found: str) -> None:
    seen: list[Any] = []

    class Placed(CausalLM):
        def to(self, *arguments: Any, **options: Any) -> Any:
            seen.append(options["device"])
            return self

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(engine_child, "build", Placed)
    config = read_config(STARTER / "config.json")
    engine_child.TorchEngine()._build(config, Settings.of(RECIPE, config), "float32")
    assert seen == [found]
