from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from node.errors import UserError
from node.workers.model import Cache, CausalLM
from node.workers.model_config import config_json, read_config
from tests.node.workers import small
from tests.node.workers.small import LLAMA, QWEN


def causal(slots: int) -> torch.Tensor:
    return torch.ones((slots, slots), dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize("raw", [QWEN, LLAMA])
def test_tensor_names_are_hugging_faces(tmp_path: Path, raw: dict[str, Any]) -> None:
    names = set(dict(small.model(small.config(tmp_path, raw)).named_parameters()))
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert ("model.layers.0.self_attn.k_proj.bias" in names) == (raw is QWEN)
    assert "model.layers.0.self_attn.o_proj.bias" not in names
    assert ("lm_head.weight" in names) == (raw is QWEN)


@pytest.mark.parametrize("raw", [QWEN, LLAMA])
def test_decoding_with_a_cache_agrees_with_one_pass(tmp_path: Path, raw: dict[str, Any]) -> None:
    made = small.model(small.config(tmp_path, raw))
    tokens = torch.tensor(small.prompts(made.config, 1, longest=1)[0] * 3 + [7, 9, 4, 30, 12])[None].repeat(2, 1)
    tokens[1] = tokens[1].flip(0)
    slots = tokens.shape[1]
    positions = torch.arange(slots)[None].expand(2, -1)
    with torch.no_grad():
        whole = made(tokens, positions, causal(slots))
        cache = Cache(made.config, 2, slots, dtype=torch.float32, device=torch.device("cpu"))
        parts = [made(tokens[:, :3], positions[:, :3], causal(3), cache)]
        for slot in range(3, slots):
            mask = torch.ones((1, 1, 1, slot + 1), dtype=torch.bool)
            parts.append(made(tokens[:, slot : slot + 1], positions[:, slot : slot + 1], mask, cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)
    assert made.logits(whole).shape == (2, slots, 50)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "raw",
    [
        QWEN,
        LLAMA,
        {**LLAMA, "rope_parameters": LLAMA3},
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {**LLAMA, "attention_bias": True, "mlp_bias": True},
        {**QWEN, "model_type": "mistral", "sliding_window": None, "head_dim": 8},
        {**QWEN, "model_type": "qwen3", "head_dim": 12},
        {**QWEN, "model_type": "qwen3", "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ],
)
def test_states_and_logits_are_those_of_transformers(tmp_path: Path, raw: dict[str, Any]) -> None:
    """And those of its reading of the configuration that is written for other libraries."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = small.config(tmp_path, raw)
    made = small.model(config)
    tokens = torch.arange(2, 48)[None]
    for table in (raw, config_json(config, 64, "float32")):
        other = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**{**table, "max_position_embeddings": 64, "pad_token_id": None})
        ).eval()
        missing, unexpected = other.load_state_dict(dict(made.named_parameters()), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        with torch.no_grad():
            hidden = made(tokens, torch.arange(46)[None], causal(46))
            found = other(tokens, output_hidden_states=True)
            torch.testing.assert_close(hidden, found.hidden_states[-1], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(made.logits(hidden), found.logits, rtol=1e-4, atol=1e-4)


def test_taking_rows_of_a_cache(tmp_path: Path) -> None:
    config = small.config(tmp_path)
    cache = Cache(config, 2, 3, dtype=torch.float32, device=torch.device("cpu"))
    cache.keys[1][:, :, :2] = torch.arange(2.0)[:, None, None, None]
    cache.length = 2
    taken = cache.take(torch.tensor([1, 0, 1]), 5)
    assert taken.length == 2
    assert taken.keys[1].shape == (3, 2, 5, 8)
    assert taken.keys[1][:, 0, 1, 0].tolist() == [1.0, 0.0, 1.0]
    assert taken.keys[1][:, :, 2:].abs().max() == 0
    cache.keys[1][:] = 9.0
    assert taken.keys[1][0, 0, 0, 0] == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not one of llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 128}, "sliding_window"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "missing or wrong"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"num_key_value_heads": 3}, "heads do not fit"),
        ({"head_dim": 7}, "heads do not fit"),
        ({"vocab_size": "many"}, "missing or wrong"),
        ({"eos_token_id": []}, "missing or wrong"),
        ({"num_attention_heads": 0}, "missing or wrong"),
    ],
)
def test_what_the_model_cannot_do_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        small.config(tmp_path, {**QWEN, **change})


def test_configurations_that_are_no_json_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the model configuration .*config.json"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot read the model configuration"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError):
        read_config(tmp_path / "config.json")


def test_defaults_and_new_style_rope_settings(tmp_path: Path) -> None:
    raw: dict[str, Any] = {
        **QWEN,
        "rope_parameters": {"rope_theta": 123.0, "rope_type": "default"},
        "eos_token_id": [3, 4],
    }
    del raw["num_key_value_heads"]
    config = small.config(tmp_path, raw)
    assert (config.rope_theta, config.key_value_heads, config.head_size, config.end_token) == (123.0, 4, 8, 3)


@pytest.mark.slow
@pytest.mark.parametrize("raw", [QWEN, LLAMA])
def test_agreement_with_transformers(tmp_path: Path, raw: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    made: CausalLM = small.model(small.config(tmp_path, raw))
    reference = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path), attn_implementation="eager"
    )
    missing, unexpected = reference.load_state_dict(dict(made.named_parameters()), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    reference.tie_weights()
    tokens = torch.tensor([[5, 9, 2, 44, 3, 17, 8, 30], [1, 2, 3, 4, 5, 6, 7, 8]])
    positions = torch.arange(8)[None].expand(2, -1)
    with torch.no_grad():
        ours = made.logits(made(tokens, positions, causal(8)))
        theirs = reference(tokens, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
