from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from node.errors import UserError
from node.workers import weight_files
from node.workers.architectures import convert
from node.workers.child_messages import ConvertModel
from node.workers.model import CausalLM
from protocol.weights.manifest import Manifest
from tests.node.workers import small
from tests.node.workers.small import LLAMA, QWEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_whole_file_loads_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    made = small.model(small.config(tmp_path))
    manifest, whole = small.store(made, tmp_path, dtype=dtype)
    described = weight_files.read_manifest(manifest)
    other = CausalLM(made.config)
    assert weight_files.load_into(other, weight_files.map_whole(described, whole)) == described.checksum
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, dict(made.named_parameters())[name].to(dtype).float())


def test_a_reload_that_kept_a_tensor_is_caught(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    with torch.no_grad():
        made.model.norm.weight[3] += 1e-6  # far less than any look at the outputs would show
    manifest, whole = small.store(made, tmp_path)
    described = weight_files.read_manifest(manifest)
    stale = small.model(made.config)
    assert weight_files.checksum(stale) != described.checksum
    tensors = weight_files.map_whole(described, whole)
    kept = {name: value for name, value in stale.named_parameters() if name == "model.norm.weight"}
    assert (
        weight_files.load_into(stale, {**tensors, **{n: v.detach().clone() for n, v in kept.items()}})
        != described.checksum
    )
    assert weight_files.load_into(stale, tensors) == described.checksum


def test_tensors_behind_an_odd_offset(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    tensors = {"a": torch.tensor([1.5, 2.5, -3.5], dtype=torch.bfloat16), "b": torch.tensor([[7.25]])}
    weight_files.write_whole(tensors.values(), path)
    manifest = Manifest.of_file(weight_files.layout(tensors), path.read_bytes(), 1)
    mapped = weight_files.map_whole(manifest, path)
    assert mapped["b"].tolist() == [[7.25]]
    assert mapped["a"].tolist() == [1.5, 2.5, -3.5]


def test_a_mapped_file_is_never_written_to(tmp_path: Path) -> None:
    manifest, whole = small.store(small.model(small.config(tmp_path)), tmp_path)
    before = whole.read_bytes()
    tensors = weight_files.map_whole(weight_files.read_manifest(manifest), whole)
    tensors["model.norm.weight"].zero_()
    assert whole.read_bytes() == before


def test_wrong_files_are_named(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    manifest, whole = small.store(made, tmp_path)
    described = weight_files.read_manifest(manifest)
    with pytest.raises(UserError, match=r"cannot map the weights .*missing"):
        weight_files.map_whole(described, tmp_path / "missing")
    whole.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(UserError, match="but the manifest says"):
        weight_files.map_whole(described, whole)
    manifest.write_bytes(b"\x90")
    with pytest.raises(UserError, match=r"cannot read the weight manifest .*version.manifest"):
        weight_files.read_manifest(manifest)


def test_weights_of_another_model_do_not_half_load(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    before = weight_files.checksum(made)
    tensors = {name: value.detach() + 1 for name, value in made.named_parameters()}
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        weight_files.load_into(made, {name: value for name, value in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(UserError, match=r"model\.norm\.weight has another shape"):
        weight_files.load_into(made, {**tensors, "model.norm.weight": torch.ones(3)})
    assert weight_files.checksum(made) == before


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"old")

    def tensors() -> Iterator[torch.Tensor]:
        yield torch.ones(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        weight_files.write_whole(tensors(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("raw", [QWEN, LLAMA])
def test_convert_a_hugging_face_directory(tmp_path: Path, raw: dict[str, Any]) -> None:
    made = small.model(small.config(tmp_path, raw))
    tensors = {name: value.detach().clone() for name, value in made.named_parameters()}
    if raw is LLAMA:
        tensors["lm_head.weight"] = tensors[
            "model.embed_tokens.weight"
        ].clone()  # a tied model's file may hold it twice
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "model-2.safetensors")
    found = convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))
    assert found.architecture == raw["model_type"]
    assert found.checksum == weight_files.checksum(made)
    assert [row[0] for row in found.tensors] == sorted(dict(made.named_parameters()))
    manifest = Manifest.of_file(found.tensors, (tmp_path / "whole").read_bytes(), weight_files.checksum(made))
    other = CausalLM(made.config)
    assert weight_files.load_into(other, weight_files.map_whole(manifest, tmp_path / "whole")) == manifest.checksum


def test_convert_refuses_what_does_not_fit(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    with pytest.raises(UserError, match=r"no .safetensors file"):
        convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"cannot read .*model.safetensors"):
        convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))
    tensors = {name: value.detach().clone() for name, value in made.named_parameters()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="float64"):
        convert(ConvertModel(str(tmp_path), str(tmp_path / "whole")))
    assert not (tmp_path / "whole").exists()
