"""Writing a version as a Hugging Face model directory, straight from the data directory's files.

1. A whole file is a safetensors file without its header (``protocol.weights.manifest``, rule 1): the header is written
   in front and the bytes are copied, chunk by chunk, each verified. Memory does not depend on the model's size, and no
   torch is needed.
2. The directory is complete or not there: it is written beside its place and renamed.
3. What was written is opened with the safetensors library, as other programs do, and compared with the manifest.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import safe_open
from tokenizers import Tokenizer

from node.cli import held_versions
from node.cli.options import Values
from node.domain import joining, pinned_files
from node.errors import UserError
from node.store.data_directory import DataDirectory
from node.store.durable_files import sync_directory
from protocol.constants import CHUNK_BYTES
from protocol.errors import LocalError, PeerError
from protocol.weights.manifest import Manifest, verify_chunk

ALIGNMENT: Final = 8
"""The safetensors format has its tensors begin at a multiple of so many bytes."""
CLASS: Final = "PreTrainedTokenizerFast"
"""transformers' class for a tokenizer of which nothing but ``tokenizer.json`` is known."""


@dataclass(frozen=True, slots=True)
class ExportedVersion:
    """A version on the disk, with what belongs to it."""

    number: int
    manifest: Manifest
    whole: Path
    config: bytes
    tokenizer: bytes


def choose(directory: DataDirectory, version: int) -> ExportedVersion:
    """Version number ``version``, -1 for the newest that is here whole. Raises ``UserError``."""
    domain = joining.required(directory)
    found = held_versions.choose(directory, version, "farflung weights pull fetches one")
    try:
        manifest = Manifest.parse(found.manifest.read_bytes())
    except (OSError, PeerError) as error:
        raise UserError(f"{found.folder}: the version cannot be read ({error})", "farflung weights pull") from None
    return ExportedVersion(
        number=found.number,
        manifest=manifest,
        whole=found.whole,
        config=pinned_files.path(directory, domain.model.config).read_bytes(),
        tokenizer=pinned_files.path(directory, domain.model.tokenizer).read_bytes(),
    )


def header(manifest: Manifest) -> bytes:
    """The beginning of the safetensors file (https://github.com/huggingface/safetensors, "Format")."""
    table: Values = {"__metadata__": {"format": "pt"}}
    offsets = manifest.tensor_offsets()
    for tensor in manifest.tensors:
        start, size = offsets[tensor.name]
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, start + size],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write(chosen: ExportedVersion, folder: Path, *, progress: Callable[[int, int], None]) -> None:
    """Write the directory ``folder``, which must be new or empty; ``progress(done, total)`` tells bytes.

    Raises ``UserError``, and ``OSError`` where the disk is full.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: it is there already and not empty", "name a new folder")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        temporary.mkdir(parents=True)
        (temporary / "config.json").write_bytes(chosen.config)
        (temporary / "tokenizer.json").write_bytes(chosen.tokenizer)
        described = json.dumps(tokenizer_config(chosen.config, chosen.tokenizer), indent=2)
        (temporary / "tokenizer_config.json").write_text(described + "\n", encoding="utf-8")
        _copy(chosen, temporary / "model.safetensors", progress)
        _compare(chosen.manifest, temporary / "model.safetensors")
        os.replace(temporary, folder)
        sync_directory(folder.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, PermissionError | NotADirectoryError):
            raise UserError(f"{folder}: cannot be made ({error.strerror})", "name a folder elsewhere") from None
        raise


def _copy(chosen: ExportedVersion, path: Path, progress: Callable[[int, int], None]) -> None:
    manifest = chosen.manifest
    with chosen.whole.open("rb") as source, path.open("wb") as target:
        target.write(header(manifest))
        for index in range(len(manifest.chunks)):
            data = source.read(CHUNK_BYTES)
            try:
                verify_chunk(manifest, index, data)
            except PeerError as error:
                raise UserError(
                    f"{chosen.whole}: version {chosen.number} is damaged ({error})",
                    f"farflung weights pull {chosen.number}, then try again",
                ) from None
            target.write(data)
            progress(min(manifest.size, (index + 1) * CHUNK_BYTES), manifest.size)
        target.flush()
        os.fsync(target.fileno())


def _compare(manifest: Manifest, path: Path) -> None:
    """Read the file's tensors back as other programs do: their names, types and shapes must be the manifest's."""
    with safe_open(path, framework="numpy") as opened:
        found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        for tensor in manifest.tensors:
            part = found.pop(tensor.name)
            if (part.get_dtype(), tuple(part.get_shape())) != (tensor.dtype, tensor.shape):
                raise LocalError(f"{path}: {tensor.name} came out as another tensor")
        if found:
            raise LocalError(f"{path}: it has more tensors than the version")


def tokenizer_config(config: bytes, tokenizer: bytes) -> Values:
    """What transformers needs to know beside ``tokenizer.json``: the class, the special tokens and the longest text."""
    model = json.loads(config)
    words = Tokenizer.from_str(tokenizer.decode())
    described: Values = {"tokenizer_class": CLASS, "clean_up_tokenization_spaces": False}
    if isinstance(longest := model.get("max_position_embeddings"), int):
        described["model_max_length"] = longest
    for name in ("bos_token", "eos_token", "pad_token"):
        number = model.get(f"{name}_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and (word := words.id_to_token(number)) is not None:
            described[name] = word
    return described
