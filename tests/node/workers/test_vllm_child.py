"""The vLLM engine: what it writes replays on torch, whatever its scheduler did; reloads are seen through."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.starter.defaults import RECIPE
from node.workers.child_messages import (
    Benchmark,
    ConfigureEngine,
    CountRewritten,
    EncodePrompts,
    GenerateGroups,
    LoadVersion,
    WrittenGroups,
)
from node.workers.engine_child import TorchEngine
from node.workers.model import CausalLM
from node.workers.weight_files import checksum, read_manifest
from proofs.checks import GroupReplay
from protocol.domain import Recipe
from tests.node.workers import small, vllm_child
from tests.node.workers.test_engine_child import claims_of, exact
from tests.node.workers.vllm_child import INSTALLED, REASON, TINY_LLAMA, TINY_QWEN, Child, configure, folder, load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason=REASON),
]

PLAIN = replace(RECIPE, group_size=4, max_prompt_tokens=64, max_response_tokens=40, temperature=1_000_000, min_p=0)
SHARP = replace(PLAIN, temperature=700_000, min_p=50_000)
PROMPTS = [f"State the final answer to the following arithmetic problem: {a} + 17 =" for a in range(10, 19)]
SEEDS = small.seeds(len(PROMPTS))


ASKED = GenerateGroups(PROMPTS, SEEDS)


def replayed(path: Path, recipe: Recipe, made: WrittenGroups, name: str = "version") -> list[GroupReplay]:
    """What the torch engine measures of groups that vLLM wrote."""
    torch_engine = TorchEngine()
    torch_engine.configure(ConfigureEngine(str(path / "config.json"), str(path / "tokenizer.json"), recipe))
    torch_engine.load(LoadVersion(str(path / f"{name}.manifest"), str(path / f"{name}.raw")))
    found = torch_engine.replay(claims_of(made, SEEDS))
    assert [group.texts for group in found] == [[one.text for one in group.responses] for group in made.groups]
    return [group.found for group in found]


def tokens(made: WrittenGroups) -> list[list[bytes]]:
    return [[one.tokens for one in group.responses] for group in made.groups]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def llama(work: Path) -> CausalLM:
    return folder(work / "llama", TINY_LLAMA, seed=3)  # some of its responses end


@pytest.fixture(scope="module")
def plain(work: Path, llama: CausalLM) -> Iterator[Child]:
    """One child with room for all sequences, for many tests."""
    with vllm_child.running(work / "cache") as child:
        assert configure(child, work / "llama", PLAIN) == checksum(llama)
        yield child


def test_what_vllm_writes_replays_exactly_on_torch(plain: Child, work: Path) -> None:
    made = plain.call(ASKED)
    assert [group.prompt for group in made.groups] == plain.call(EncodePrompts(PROMPTS))
    assert exact(replayed(work / "llama", PLAIN, made))
    lengths = [len(one.tokens) // 4 for group in made.groups for one in group.responses]
    assert made.tokens == sum(lengths)
    assert min(lengths) < 40 == max(lengths)
    assert plain.call(Benchmark()) > 0


def test_a_result_does_not_depend_on_the_batch(plain: Child) -> None:
    together = tokens(plain.call(ASKED))
    assert tokens(plain.call(GenerateGroups(PROMPTS[::-1], SEEDS[::-1])))[::-1] == together
    assert tokens(plain.call(GenerateGroups(PROMPTS[3:4], SEEDS[3:4]))) == together[3:4]


def test_a_reload_changes_everything_and_nothing_stays_behind(plain: Child, work: Path, llama: CausalLM) -> None:
    path = work / "llama"
    before = tokens(plain.call(ASKED))
    other = small.model(llama.config, seed=5)
    small.store(other, path, "other")
    small.store(other, path, "rounded", torch.bfloat16)
    resident = []
    for name in ("other", "rounded", "other", "rounded", "version"):
        assert load(plain, path, name) == read_manifest(path / f"{name}.manifest").checksum
        made = plain.call(ASKED)
        # Prompts are the same, so keys and values that stayed in the prefix cache would show.
        assert exact(replayed(path, PLAIN, made, name))
        assert (tokens(made) == before) == (name == "version")
        resident.append(int(Path(f"/proc/{plain.pid}/statm").read_text().split()[1]))
    assert resident[-1] - resident[0] < 20 << 8  # pages: a version's weights and its packed form are not kept


def test_chunked_prompts_and_preemption_change_nothing(work: Path, llama: CausalLM) -> None:
    """A cache of few blocks and steps of 24 tokens, on another architecture, sharper and with min-p."""
    path = work / "qwen"
    folder(path, TINY_QWEN, seed=4)
    with vllm_child.running(work / "cache") as child:
        block = 2 * 2 * 2 * 32 * 4 * 32  # keys and values, layers, heads, head size, bytes, tokens
        configure(child, path, SHARP, cache_bytes=10 * block, max_batched_tokens=24)
        made = child.call(ASKED)
        assert child.call(CountRewritten()) > len(PROMPTS)
    assert exact(replayed(path, SHARP, made))
    assert made.tokens < 40 * 4 * len(PROMPTS)


def test_a_load_that_leaves_tensors_out_shows_in_the_checksum(work: Path, llama: CausalLM) -> None:
    path = work / "llama"
    other = small.model(llama.config, seed=6)
    small.store(other, path, "third")
    with vllm_child.running(work / "cache", "tests.node.workers.vllm_child") as child:
        assert configure(child, path, PLAIN) == checksum(llama)
        assert load(child, path, "third") != checksum(other)


def test_tensor_parallel_ranks_agree_and_die_together(work: Path, llama: CausalLM) -> None:
    path = work / "llama"
    with vllm_child.running(work / "cache") as child:
        assert configure(child, path, PLAIN, tensor_parallel=2) == checksum(llama)
        made = child.call(ASKED)
        assert exact(replayed(path, PLAIN, made))
        group = members(child.pid)
        assert len(group) >= 3
        workers = [pid for pid in group if pid != child.pid and "VLLM" in Path(f"/proc/{pid}/comm").read_text()]
        os.kill(workers[-1], signal.SIGKILL)
        with pytest.raises((EOFError, ConnectionResetError)):
            child.call(ASKED)
        os.killpg(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while members(child.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not members(child.pid)


def members(group: int) -> list[int]:
    """The processes of a process group that are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, number = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(number) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def test_what_cannot_be_is_refused_in_one_line(work: Path) -> None:
    path = work / "narrow"
    folder(path, {**TINY_LLAMA, "head_dim": 12})
    with vllm_child.running(work / "cache") as child:
        with pytest.raises(RuntimeError, match="no attention for heads of 12 on a CPU: set engine to torch"):
            configure(child, path, PLAIN)
        with pytest.raises(RuntimeError, match="tensor_parallel 3 does not divide the model's 2 key-value heads"):
            configure(child, path, PLAIN, tensor_parallel=3)
        folder(path, {**TINY_QWEN, "head_dim": 64})
        with pytest.raises(RuntimeError, match="vLLM's qwen2 takes heads to be of 32, not of 64: set engine to torch"):
            configure(child, path, PLAIN)
