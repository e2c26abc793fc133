"""Founding a devnet's domain: which tasks it is given, and what lies in the founder's directory afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from msgspec.structs import replace as replace_fields

from node.domain import founding, task_tables
from node.errors import UserError
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from node.store.version_store import VersionStore
from node.tasks.allowlist import REASONING_GYM_VERSION
from node.tasks.code.program_runner import own_version
from node.tasks.task_versions import MATH
from node.workers.child_messages import ConvertedModel
from protocol.domain import parse_genesis
from protocol.taskset import TaskSet
from protocol.weights.manifest import Manifest
from tests.node.tasks.test_package_tasks import install

TABLE = """
[[task]]
name = "chain_sum"
weight = 3
parameters = { min_terms = 2, max_terms = 3 }
set = "sums.txt"

[[task]]
kind = "jsonl"
name = "homework"
file = "homework.jsonl"
"""


OTHERS = """
[[task]]
kind = "jsonl"
name = "words"
file = "words.jsonl"
columns = { question = "q" }
skip = true
parameters = { check = "exact" }

[[task]]
kind = "code"
name = "programs"
file = "mbpp.jsonl"

[[task]]
kind = "package"
name = "riddles"
package = "farflung-riddles"
"""


def test_names_stand_for_reasoning_gyms_data_sets() -> None:
    rows = task_tables.named("chain_sum, gcd")
    assert [(row["kind"], row["name"], row["weight"], row["parameters"], row["data"]) for row in rows] == [
        ("reasoning-gym", "chain_sum", 1, "{}", None),
        ("reasoning-gym", "gcd", 1, "{}", None),
    ]
    assert {row["version"] for row in rows} == {REASONING_GYM_VERSION}


def test_a_file_names_weights_parameters_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "tasks.toml").write_text(TABLE)
    (tmp_path / "sums.txt").write_text("8\n3\n")
    (tmp_path / "homework.jsonl").write_text('{"problem": "1+1?", "answer": 2, "level": 1}\n')
    first, second = task_tables.named(str(tmp_path / "tasks.toml"))
    assert (first["weight"], json.loads(first["parameters"])) == (3, {"min_terms": 2, "max_terms": 3})
    assert (second["kind"], second["version"]) == ("jsonl", MATH)
    assert Path(second["data"]).read_text() == '{"question": "1+1?", "answer": "2"}\n'
    assert (first["items"], second["items"]) == (TaskSet.of([3, 8]).encode(), None)


def test_files_and_packages_of_other_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path / "elsewhere")))
    (tmp_path / "tasks.toml").write_text(OTHERS)
    (tmp_path / "words.jsonl").write_text('{"q": "Who?", "answer": "me"}\n{"q": "", "answer": "me"}\n')
    (tmp_path / "mbpp.jsonl").write_text('{"problem": "Double.", "test_list": ["assert f(2) == 4"]}\n')
    words, programs, riddles = task_tables.named(str(tmp_path / "tasks.toml"))
    assert (words["version"], words["parameters"]) == ("exact==1", '{"check": "exact"}')
    assert Path(words["data"]).read_text() == '{"question": "Who?", "answer": "me"}\n'
    assert (programs["kind"], programs["version"]) == ("code", f"python=={own_version()}")
    tests = [{"call": "f(2)", "returns": 4}]
    assert json.loads(Path(programs["data"]).read_text()) == {"question": "Double.", "tests": tests}
    assert (riddles["version"], riddles["data"]) == ("farflung-riddles==1.2.0", None)


def test_by_default_it_is_the_starter_models_own_mix() -> None:
    assert task_tables.named(None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[task]]\nnam = 'x'", "unknown key 'nam'"),
        ("[[task]]\nweight = 1", "the name is missing"),
        ("[[task]]\nname = ''", "the name is missing"),
        ("[[task]]\nname = 'x'\nweight = 0", "the weight of x"),
        ("[[task]]\nname = 'x'\nweight = true", "the weight of x"),
        ("[[task]]\nname = 'x'\nkind = 'poem'", "unknown kind 'poem'"),
        ("[[task]]\nname = 'x'\nparameters = 3", "the parameters of x"),
        ("[[task]]\nname = 'x'\nkind = 'jsonl'", "names its file"),
        ("[[task]]\nname = 'x'\nfile = 'x.jsonl'", "names its file"),
        ("[[task]]\nname = 'x'\nkind = 'code'", "names its file"),
        ("[[task]]\nname = 'x'\nskip = true", "skip is for tasks of kind jsonl or code"),
        ("[[task]]\nname = 'x'\nkind = 'code'\nfile = 'x'\nskip = 1", "skip is for tasks of kind jsonl or code"),
        ("[[task]]\nname = 'x'\nkind = 'code'\nfile = 'x'\ncolumns = { tests = 1 }", "columns does not name columns"),
        ("[[task]]\nname = 'x'\npackage = 'p'", "package is for tasks of kind package"),
        ("[[task]]\nname = 'x'\nset = 3", "the set is not the path"),
        ("[[task]]\nname = 'x'\nparameters = { a = 2020-01-01 }", "hold what JSON cannot"),
        ("[[task]]\nname = 'x'\nparameters = { a = nan }", "hold what JSON cannot"),
        ("[[task]]\nname = 'x'\nkind = 'jsonl'\nfile = \"a\\u0000b\"", "'a\\x00b' is not the path of a file"),
        ("[[task]]\nname = 'gcd'\nset = \"a\\u0000b\"", "'a\\x00b' is not the path of a file"),
        ("task = []", "expected [[task]]"),
        ("task = 3", "expected [[task]]"),
        ("task = [3]", "expected [[task]]"),
        ("x = 3", "expected [[task]]"),
        ("[[task", "not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "tasks.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        task_tables.named(str(file))
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["", " , "])
def test_names_that_name_nothing_stand_for_nothing(text: str) -> None:
    with pytest.raises(UserError, match="no task is named"):
        task_tables.named(text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.toml: cannot be read"):
        task_tables.named(str(tmp_path / "nothing.toml"))


async def test_a_model_that_only_transformers_knows(tmp_path: Path) -> None:
    """Only the library can say how long its sequences may be, and that counts."""
    folder, directory = tmp_path / "model", DataDirectory(tmp_path / "founder")
    directory.create()
    directory.identity()
    vocabulary = json.loads((founding.MODEL / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocabulary, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 69}
    settings = transformers.AutoConfig.for_model("gpt2", **sizes, eos_token_id=1, bos_token_id=1)
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((founding.MODEL / "tokenizer.json").read_bytes())
    asked = replace(founding.devnet(name="test", nodes=5, tasks=None), model=folder)
    domain = await founding.found(directory, asked)
    assert domain.model.architecture == "gpt2"
    assert BlobStore(directory.blobs).get(domain.model.config.hash) == (folder / "config.json").read_bytes()

    async def converted(folder: Path, whole: Path, dtype: str, size: int) -> ConvertedModel:
        return replace_fields(await founding.convert_model(folder, whole, dtype, size), positions=69)

    longer = replace(asked, recipe=replace(asked.recipe, max_prompt_tokens=65))
    with pytest.raises(UserError, match="the model has 69 positions, and prompts and responses take 70 tokens"):
        await founding.found(directory, longer, convert=converted)


async def test_everything_that_the_genesis_names_lies_in_the_founders_directory(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "founder")
    directory.create()
    creator = directory.identity()
    table = tmp_path / "tasks.toml"
    table.write_text(TABLE[: TABLE.index("[[task]]", 10)])
    (tmp_path / "sums.txt").write_text("8\n3\n")
    asked = founding.devnet(name="test", nodes=5, tasks=str(table))
    await founding.found(directory, replace(asked, dtype="bfloat16"))
    data = directory.genesis()
    assert data is not None
    domain = parse_genesis(data)
    assert (domain.creator, domain.electors, domain.devnet) == (creator.node, (creator.node,), 1)
    assert domain.policy.min_nodes == 5
    assert domain.timings.epoch_ms == 500
    blobs = BlobStore(directory.blobs)
    for blob in (domain.model.config, domain.model.tokenizer, domain.model.manifest):
        assert blobs.size(blob.hash) == blob.size
    chosen = domain.tasks[0].items
    assert chosen is not None
    assert TaskSet.parse(blobs.get(chosen.hash) or b"").items == (3, 8)
    versions = VersionStore(directory.versions)
    assert versions.complete(domain.model.manifest.hash)
    manifest = Manifest.parse(blobs.get(domain.model.manifest.hash) or b"")
    assert manifest.whole == domain.model.whole
    # Whoever computes in bfloat16 loads values that were rounded once, for all.
    assert domain.model.compute_dtype == "bfloat16"
    assert {tensor.dtype for tensor in manifest.tensors} == {"BF16"}
    assert list(directory.work.iterdir()) == []
