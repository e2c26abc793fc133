"""Models that transformers computes: small random ones of several architectures, made from configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor

from node.errors import UserError
from node.workers import engine_child, forger_zoo, row_layout, sharding, transformers_model, weight_files
from node.workers.architectures import build, convert, read_config
from node.workers.child_messages import ConvertedModel, ConvertModel
from node.workers.learner import make_policy
from node.workers.model import LanguageModel
from node.workers.policy import TrainedPolicy
from node.workers.trainer_child import _fill
from protocol.weights.manifest import Manifest
from tests.node.workers import small
from tests.node.workers.small import RECIPE_SMALL, SETTINGS

OLD = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "eos_token_id": 1, "bos_token_id": 1}
PLAIN = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**OLD, "n_positions": 40},  # learned positions, dropout, tied
    "phi": PLAIN,  # a bias on the logits
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 32, "final_logit_softcapping": 2.0},
    "granite": {**GROUPED, "logits_scaling": 3.0, "embedding_multiplier": 4.0, "tie_word_embeddings": False},
    "mixtral": {**GROUPED, "num_local_experts": 4},  # its class stores experts under other names than files do
    # our own implementation has no sliding windows
    "mistral": {**GROUPED, "sliding_window": 32, "max_position_embeddings": 64, "tie_word_embeddings": True},
}


def write(folder: Path, name: str) -> Any:
    """Write a Hugging Face folder of a random model; returns the library's model of it."""
    settings = transformers.AutoConfig.for_model(name, **FAMILIES[name])
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    made.save_pretrained(folder)
    return made.eval()


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, ConvertedModel]:
    """A folder, the library's model, and what conversion of the folder found."""
    folder = tmp_path_factory.mktemp(request.param)
    library = write(folder, request.param)
    return folder, library, convert(ConvertModel(str(folder), str(folder / "whole")))


def version(folder: Path, found: ConvertedModel) -> dict[str, Tensor]:
    manifest = Manifest.of_file(found.tensors, (folder / "whole").read_bytes(), found.checksum)
    return weight_files.map_whole(manifest, folder / "whole")


def loaded(folder: Path, found: ConvertedModel) -> LanguageModel:
    made = build(read_config(folder / "config.json"))
    assert weight_files.load_into(made, version(folder, found)) == found.checksum
    return made


def test_what_is_published_loads_in_transformers_again(case: tuple[Path, Any, ConvertedModel], tmp_path: Path) -> None:
    folder, library, found = case
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = version(folder, found)
    save_file(
        {name: value.clone() for name, value in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, local_files_only=True, attn_implementation="eager"
    )
    line = torch.arange(2, 12)[None]
    assert torch.equal(again.eval()(line).logits, library(line).logits)


def test_what_is_generated_replays_exactly(case: tuple[Path, Any, ConvertedModel]) -> None:
    folder, _, found = case
    made = loaded(folder, found)
    claims = small.written(made, small.prompts(made.config, 3))
    for result in engine_child.replay(made, claims, SETTINGS, clip=1000):
        assert (result.mismatches, result.deficit_sum, result.activation_mismatches) == (0, 0, 0)
        assert result.logprob_error_max < 100  # 1e-4


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_rows_train_as_sequences_alone_do(case: tuple[Path, Any, ConvertedModel], recompute: bool) -> None:
    folder, library, found = case
    made = loaded(folder, found)
    made.recompute = recompute
    policy = TrainedPolicy(made, 0.7).train()
    groups = [row_layout.RowGroup([5, 6, 7], [[8, 9], [10, 11, 12], [13]]), row_layout.RowGroup([4], [[3, 2, 9, 9]])]
    (packed,) = row_layout.pack(groups)
    loss = policy(packed, lambda logprobs, spread, _: -(logprobs + 0.3 * spread).sum())
    loss.backward()

    library.zero_grad(set_to_none=True)
    expected = torch.zeros(())
    for group in groups:
        for response in group.responses:
            line = torch.tensor([[*group.prompt, *response]])
            logits = library(line, use_cache=False).logits[0, len(group.prompt) - 1 : -1]
            logs = torch.log_softmax(logits / 0.7, dim=-1)
            chosen = logs.gather(1, torch.tensor(response)[:, None])
            expected = expected - (chosen.sum() - 0.3 * (logs.exp() * logs).sum())
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = dict(library.named_parameters())
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.fixture
def single() -> Iterator[sharding.Ranks]:
    """A sharded group of this process alone."""
    yield sharding.alone("cpu", sharded=True)
    dist.destroy_process_group()


def test_a_sharded_policy_in_bfloat16_is_the_model_that_generates(
    case: tuple[Path, Any, ConvertedModel], single: sharding.Ranks
) -> None:
    folder, _, found = case
    tensors = version(folder, found)
    plain = loaded(folder, found).to(torch.bfloat16)
    policy = make_policy(plain.config, RECIPE_SMALL, single, torch.bfloat16)
    _fill(single, policy, tensors)
    assert single.checksum(policy.model.parameters()) == found.checksum
    (packed,) = row_layout.pack([row_layout.RowGroup([5, 6, 7], [[8, 9], [10, 11, 12]])])
    torch.testing.assert_close(policy(packed), TrainedPolicy(plain, 1.0)(packed), rtol=0, atol=1e-3)
    policy(packed, lambda logprobs, spread, _: -logprobs.sum()).backward()
    assert all(parameter.grad is not None for parameter in policy.model.parameters())


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"model_type": "mamba", **PLAIN}, "linear_attention|transformers cannot read it as a mamba model"),
        ({"model_type": "t5"}, "t5 is no model that writes text from left to right alone"),
        ({"model_type": "nobodys"}, "transformers .* has no model_type 'nobodys'$"),
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.M"}},
            "code that comes with a model is never run",
        ),
        ({"model_type": "gpt2", **OLD, "eos_token_id": 50}, "eos_token_id 50 is not in the vocabulary of 50"),
        ({"model_type": "gpt2", **OLD, "quantization_config": {}}, "quantization_config is not supported"),
        ({**small.LLAMA, "quantization_config": {}}, "quantization_config is not supported"),
        ({"model_type": "qwen3_next", **PLAIN}, "layers of linear_attention cannot be replayed in one pass"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, raw: dict[str, Any], line: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=line):
        convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    library = write(tmp_path, "phi")
    tensors = {name: value.detach().clone() for name, value in library.named_parameters()}
    del tensors["lm_head.bias"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"do not fit the model's configuration: lm_head.bias and 0 more tensors"):
        convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))
    save_file({name: value.double() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="there are tensors of F64"):
        convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \.safetensors file"):
        convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))


def test_a_class_that_ignores_the_mask_or_adds_to_the_logits_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "phi")
    forward = transformers_model.Foreign.forward
    with monkeypatch.context() as patched:
        patched.setattr(transformers_model.Foreign, "head_bias", None)
        with pytest.raises(
            UserError, match="this phi model cannot be verified: generating with a cache moves its logits"
        ):
            convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))

    def blind(self: Any, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        return forward(self, tokens, positions, mask if cache is not None else None, cache)

    monkeypatch.setattr(transformers_model.Foreign, "forward", blind)
    with pytest.raises(UserError, match="cannot be verified: packing sequences into rows moves its logits"):
        convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))
    assert not (tmp_path / "whole").exists()


def test_a_class_without_masks_of_four_dimensions_is_refused(tmp_path: Path) -> None:
    settings = transformers.AutoConfig.for_model(
        "bloom", vocab_size=50, hidden_size=32, n_layer=2, n_head=4, eos_token_id=1
    )
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="this bloom model takes no mask of four dimensions"):
        convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))


def test_how_long_sequences_may_be(tmp_path: Path) -> None:
    def positions(raw: dict[str, Any]) -> int | None:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_config(tmp_path / "config.json").positions

    assert positions({"model_type": "gpt2", **FAMILIES["gpt2"]}) == 40
    assert positions({"model_type": "gpt2", **OLD}) == 1024  # the class's default
    assert positions({"model_type": "gemma2", **FAMILIES["gemma2"]}) == 32  # its window
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi3 = {"model_type": "phi3", **GROUPED, "max_position_embeddings": 512, "original_max_position_embeddings": 128}
    assert positions({**phi3, "rope_parameters": longrope}) == 128


def test_weights_can_be_calibrated_on(case: tuple[Path, Any, ConvertedModel]) -> None:
    """Copies in other precisions and without layers are models of their own; the original stays as it is."""
    folder, _, found = case
    made = loaded(folder, found)
    line, places = torch.arange(2, 12)[None], torch.arange(10)[None]
    with torch.no_grad():
        before = made(line, places, None)
        short, rounded = forger_zoo.smaller(made), forger_zoo.quantised(made, 8)
        assert (len(short.layers), len(made.layers)) == (1, 2)
        assert torch.equal(made(line, places, None), before)
        assert not torch.allclose(short(line, places, None), before, atol=1e-2)
        error = (rounded(line, places, None) - before).norm() / before.norm()
        assert 1e-5 < float(error) < 0.2
