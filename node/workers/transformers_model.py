"""A causal language model of any architecture that Hugging Face transformers implements, behind the interface of ours.

1. Only classes of the installed library are built: no code comes with a model, and nothing is fetched. Of a
   ``config.json`` only what describes the architecture is passed on.
2. The library's module for everything below the output projection is used as it is, under its own parameter names. It
   gets positions and a mask of four dimensions, so packed rows and left padding mean what they mean to our own model.
3. Attention is torch's (``sdpa``) where the class has it, and the plain one where not. Every layer sees all that the
   mask shows, so a sequence must not outgrow a sliding window, a chunk, or the positions that rotary frequencies were
   stretched for: ``Config.positions`` is the least of them.
4. The output projection is ours (``LanguageModel.logits``), with the bias, the soft cap and the scale that the
   configuration names.
5. Whether rules 2 to 4 give what the library itself gives is tried on every model that a domain is founded on
   (``check``): an architecture is refused for its numbers, not for its name.
6. Nothing is random while training: dropout stays off, so that the trained policy is the one that generated.

Needs transformers; imported only in children, and only for a model that ``node.workers.model`` does not implement.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from node.errors import UserError
from node.workers import row_layout, weight_files
from node.workers.generation import SamplingSettings, Written, generate
from node.workers.model import LanguageModel
from node.workers.model_config import ModelConfig

TOLERANCE: Final = 1e-3
"""How far logits may lie from the library's, as a share of their spread. Rounding in float32 is a hundredth of it."""
_STRETCHED: Final = ("dynamic", "longrope")
_KINDS: Final = ("full_attention", "sliding_attention", "chunked_attention")
_OPTIONAL: Final = ("use_cache", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype")


def _quiet() -> None:
    """Keep the library's warnings and progress bars out of the daemon's log: what matters is checked here."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _described(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration describes the architecture; names of implementations could lead to other code."""
    found = {}
    for key, value in raw.items():
        if key.startswith("_") or key.endswith("_implementation") or key in _OPTIONAL:
            continue
        found[key] = _described(value) if isinstance(value, dict) else value
    return found


def _library_config(text: str) -> Any:
    raw = _described(json.loads(text))
    return transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)


def parse(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """The ``Config`` of a ``config.json``'s content; ``path`` is for messages. Raises ``UserError``."""
    _quiet()
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        extra = ", and code that comes with a model is never run" if raw.get("auto_map") else ""
        raise UserError(f"{path}: transformers {transformers.__version__} has no model_type {kind!r}{extra}")
    if raw.get("quantization_config") is not None:
        raise UserError(f"{path}: this setting of quantization_config is not supported")
    text = json.dumps(_described(raw), sort_keys=True)
    try:
        outer = _library_config(text)
        inner = outer.get_text_config(decoder=True)
        heads, hidden, end = inner.num_attention_heads, inner.hidden_size, inner.eos_token_id
        config = ModelConfig(
            architecture=kind,
            vocabulary=int(inner.vocab_size),
            hidden=int(hidden),
            intermediate=int(getattr(inner, "intermediate_size", None) or 4 * hidden),
            layers=int(inner.num_hidden_layers),
            heads=int(heads),
            key_value_heads=int(getattr(inner, "num_key_value_heads", None) or heads),
            head_size=int(getattr(inner, "head_dim", None) or hidden // heads),
            norm_epsilon=0.0,
            rope_theta=0.0,
            tied=bool(inner.tie_word_embeddings),
            qkv_bias=False,
            end_token=int(end[0] if isinstance(end, list) else end),
            positions=_positions(inner),
            foreign=text,
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # each architecture's class checks its fields in its own way
        raise UserError(f"{path}: transformers cannot read it as a {kind} model that writes text: {error}") from None
    if outer.is_encoder_decoder or type(outer) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{path}: {kind} is no model that writes text from left to right alone")
    if not 0 <= config.end_token < config.vocabulary:
        raise UserError(f"{path}: eos_token_id {config.end_token} is not in the vocabulary of {config.vocabulary}")
    return config


def _positions(config: Any) -> int | None:
    """How many tokens a sequence may have (rule 3); None where nothing limits it."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - set(_KINDS):
        raise UserError(f"layers of {min(kinds - set(_KINDS))} cannot be replayed in one pass")
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "sliding_window")]
    limits.append(getattr(config, "attention_chunk_size", None))
    rope = getattr(config, "rope_parameters", None) or {}
    for table in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if table.get("rope_type") in _STRETCHED:
            limits.append(table.get("original_max_position_embeddings"))
            limits.append(getattr(config, "original_max_position_embeddings", None))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


@contextmanager
def _without_weights() -> Iterator[None]:
    """While modules are made: parameters are described and take no room, but constants (buffers) are computed."""
    register = nn.Module.register_parameter

    def described(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = described  # type: ignore[method-assign, assignment]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _made(config: ModelConfig, attention: str | None = None) -> Any:
    """The library's model, its parameters on the meta device; with ``attention``, or the one of rule 3."""
    settings = _library_config(config.foreign)
    make = partial(transformers.AutoModelForCausalLM.from_config, settings, dtype=torch.float32)
    with _without_weights():
        try:
            return make(attn_implementation=attention or "sdpa").eval()
        except ValueError:
            if attention is not None:
                raise
            return make(attn_implementation="eager").eval()


class _Cache:
    """The library's cache of keys and values, one that keeps all slots in every layer."""

    def __init__(self, kept: Any = None) -> None:
        self.kept = transformers.DynamicCache() if kept is None else kept

    def take(self, rows: Tensor, capacity: int) -> _Cache:
        """A cache of the given rows (indices, repeats allowed); it grows as it needs, whatever ``capacity`` is."""
        found = transformers.DynamicCache()
        for number, layer in enumerate(self.kept.layers):
            found.update(layer.keys[rows], layer.values[rows], number)
        return _Cache(found)


class Foreign(LanguageModel):
    """The library's model for ``config.foreign``, without weights yet: its parameters lie on the meta device.

    Raises ``UserError`` for a class that is not built as causal language models are.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        _quiet()
        try:
            inner = _made(config)
            prefix = inner.base_model_prefix
            body, head = getattr(inner, prefix), inner.get_output_embeddings()
        except Exception as error:  # whatever a class does with a configuration that it was not made for
            raise UserError(f"transformers cannot build this {config.architecture} model: {error}") from None
        if not isinstance(head, nn.Linear):
            raise UserError(f"{type(inner).__name__} is not one stack of layers with an output projection")
        self._tied = head.weight is body.get_input_embeddings().weight
        self._prefix = prefix
        self._head = next(name for name, module in inner.named_modules() if module is head)
        self.add_module(prefix, body)
        if not self._tied:
            self.add_module(self._head, head)
        names = [name for name, _ in self.named_parameters(remove_duplicate=False)]
        stacks = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == config.layers]
        if sorted(names) != sorted(name for name, _ in inner.named_parameters()) or not stacks:
            raise UserError(f"{type(inner).__name__} shares weights in a way that is not supported")
        self._stack = [stacks[0]]  # in a list, for it belongs to the body already
        self._additive = inner.config._attn_implementation == "eager"
        settings = inner.config.get_text_config(decoder=True)
        self.soft_cap = getattr(settings, "final_logit_softcapping", None)
        divided = getattr(settings, "logits_scaling", None)
        self._scale = float(getattr(settings, "logit_scale", None) or (1 / divided if divided else 1.0))
        self._constants = dict(self.named_buffers())
        for layer in self.layers:
            layer.forward = partial(self._layer, layer.forward)
        self.eval()

    # What follows keeps the library's module fit for use

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Foreign:
        """Constants keep their precision and their values, wherever parameters are moved to."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in self._constants.items():
            owner, _, last = name.rpartition(".")
            self.get_submodule(owner)._buffers[last] = value.to(self.device)
        return self

    def train(self, mode: bool = True) -> Foreign:
        """As it is: see rule 6."""
        super().train(False)
        return self

    def _layer(self, forward: Callable[..., Any], *values: Any, **named: Any) -> Any:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(forward, *values, use_reentrant=False, preserve_rng_state=False, **named)
        return forward(*values, **named)

    # The interface

    @property
    def _body(self) -> Any:
        return self.get_submodule(self._prefix)

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, in order."""
        return self._stack[0]

    @property
    def embeddings(self) -> Tensor:
        """The input embeddings [V, H]."""
        weight: Tensor = self._body.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """The output projection [V, H]."""
        return self.embeddings if self._tied else self.get_parameter(f"{self._head}.weight")

    @property
    def head_bias(self) -> Tensor | None:
        """What is added to the logits [V]."""
        return None if self._tied else getattr(self.get_submodule(self._head), "bias", None)

    def cache(self, rows: int, capacity: int) -> _Cache:
        """An empty cache; it grows as it needs."""
        return _Cache()

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        """See ``LanguageModel.forward``; the states are those that the output projection takes, scaled (rule 4)."""
        if mask is not None and self._additive:
            low = torch.finfo(self.dtype).min
            mask = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, low)
        named: dict[str, Any] = {}
        if cache is not None:
            named = dict.fromkeys(_cache_names(self._body), cache.kept)
        found = self._body(
            input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=cache is not None, **named
        )
        hidden: Tensor = found.last_hidden_state
        return hidden if self._scale == 1.0 else hidden * self._scale


def _cache_names(module: Any) -> list[str]:
    """The argument that takes a cache: its name changed within version 5 of the library."""
    taken = inspect.signature(type(module).forward).parameters
    return [name for name in ("cache", "past_key_values") if name in taken][:1]


# Founding a domain on such a model


def read_weights(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """The parameters in the folder's safetensors files under the names of the library's module, sorted; in the dtype of
    the files where all have one, else in float32. Raises ``UserError`` where one is missing or has another shape."""
    _quiet()
    dtypes = _dtypes(folder)
    settings = _library_config(config.foreign)
    made = _made(config)
    try:
        loaded, report = type(made).from_pretrained(
            folder,
            config=settings,
            dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32,
            attn_implementation=made.config._attn_implementation,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # many, of several libraries
        raise UserError(f"transformers cannot load {folder}: {error}") from None
    if lost := [*report["missing_keys"], *(row[0] for row in report["mismatched_keys"])]:
        raise UserError(
            f"the weights do not fit the model's configuration: {min(lost)} and {len(lost) - 1} more tensors"
        )
    return dict(sorted((name, value.detach()) for name, value in loaded.named_parameters()))


def _dtypes(folder: Path) -> set[torch.dtype]:
    """The floating-point dtypes in the folder's safetensors files. Raises ``UserError``."""
    found = set()
    for path in weight_files.safetensors_files(folder):
        try:
            with safe_open(path, framework="pt") as opened:
                found |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {path}: {error}") from None
    floating = {name for name in found if "F" in name}  # old files of GPT-2 hold masks as well
    if odd := floating - weight_files.DTYPES.keys():
        raise UserError(f"{folder}: there are tensors of {min(odd)}; weights are float32, bfloat16 or float16")
    return {weight_files.DTYPES[name] for name in floating}


_CHECKED: Final = SamplingSettings(
    group_size=2, max_prompt_tokens=8, max_tokens=4, temperature=1.0, min_p=0.0, end_token=-1
)


@torch.inference_mode()
def check(model: LanguageModel) -> None:
    """Compare generation with a cache and packed rows, as ``model`` computes them, with the library's own logits of
    each sequence alone. Raises ``UserError`` for a model that computes something else."""
    config = model.config
    library = _made(config, "eager")
    parameters = dict(model.named_parameters())
    library.load_state_dict(parameters, strict=False, assign=True)
    library.tie_weights()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocabulary, (size,), generator=generator).tolist() for size in (6, 3)]
    try:
        groups = generate(model, prompts, [bytes([number]) * 32 for number in range(len(prompts))], _CHECKED)
        packed = _packed(model, prompts, groups)
    except Exception as error:  # whatever a class does with masks and caches that it was not made for
        raise UserError(f"this {config.architecture} model takes no mask of four dimensions: {error}") from None
    written = torch.cat([torch.from_numpy(one.states) for group in groups for one in group])
    expected = torch.cat(
        [_alone(library, prompt, one.tokens) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    )
    allowed = TOLERANCE * float(expected.std())
    for what, states in (("generating with a cache", written), ("packing sequences into rows", packed)):
        found = float((model.logits(states) - expected).abs().max())
        if not found <= allowed:
            raise UserError(
                f"this {config.architecture} model cannot be verified: {what} moves its logits by {found:.2g} "
                f"(allowed: {allowed:.2g})"
            )


def _packed(model: LanguageModel, prompts: list[list[int]], groups: list[list[Written]]) -> Tensor:
    """The states [N, H] that chose the groups' tokens, from rows that share prompts."""
    laid = row_layout.pack(
        [
            row_layout.RowGroup(prompt, [one.tokens for one in group])
            for prompt, group in zip(prompts, groups, strict=True)
        ]
    )
    return torch.cat([row_layout.chosen_by(model, batch) for batch in laid])


def _alone(library: Any, prompt: list[int], response: list[int]) -> Tensor:
    """The library's logits [tokens, V] for a response's tokens, from one plain pass over its sequence."""
    logits: Tensor = library(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].float()
