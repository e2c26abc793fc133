"""Children compute on a GPU where there is one: checked without one."""

from __future__ import annotations

import pytest
import torch

from node.workers.architectures import chosen
from node.workers.child_messages import ConfigureEngine, ConfigureTrainer
from node.workers.engine_child import TorchEngine
from node.workers.trainer_child import Trainer
from tests.node.workers.small import STARTER
from tests.protocol.builders import RECIPE

CONFIG, TOKENIZER = str(STARTER / "config.json"), str(STARTER / "tokenizer.json")


@pytest.mark.parametrize(("there", "found"), [(True, "cuda"), (False, "cpu")])
def test_a_gpu_is_taken_where_torch_has_one(there: bool, found: str) -> None:
    assert chosen("auto", there) == found
    assert chosen("cpu", there) == "cpu"
    assert chosen("cuda:1", there) == "cuda:1"


def test_children_compute_where_they_are_asked_to() -> None:
    """As roles configure them: a device of which torch has none is what they fail at."""
    assert chosen("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    engine, trainer = ConfigureEngine(CONFIG, TOKENIZER, RECIPE), ConfigureTrainer(CONFIG, RECIPE)
    assert (engine.device, trainer.device) == ("auto", "auto")
    for device, there in (("cpu", True), ("cuda:99", False)):
        for configure in (
            lambda device=device: TorchEngine().configure(ConfigureEngine(CONFIG, TOKENIZER, RECIPE, device=device)),
            lambda device=device: Trainer().configure(ConfigureTrainer(CONFIG, RECIPE, device=device)),
        ):
            if there:
                configure()
            else:
                with pytest.raises((RuntimeError, AssertionError)):
                    configure()
