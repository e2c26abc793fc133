"""Amendments over the control socket and by the command, from the making to the cut that it changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from node.api import control_socket
from node.api.control_client import Unavailable, request
from node.cli import amend, main
from node.errors import UserError
from node.store.data_directory import DataDirectory
from protocol.log.amendment import Amendment
from tests.node.cli.stand_ins import serving
from tests.node.fake_children import Faults
from tests.node.fakes import Running, open_cluster
from tests.protocol.builders import THRESHOLDS, digest, key


def run(*words: str) -> int:
    """The command, in the test's own process."""
    return main.main(["domain", "amend", *words])


async def test_it_is_made_signed_carried_and_in_force(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "amendment.json"
    async with open_cluster(tmp_path, faults) as cluster:
        elector = await cluster.node("elector")
        other = await cluster.node("a")
        for running in (elector, other):
            await running.nursery.start(control_socket.run, running.node)
        answers: list[dict[str, Any]] = []

        async def command(running: Running, *words: str) -> int:
            """The command asks the socket in a loop of its own; here it is asked for it."""

            def ask(arguments: Any, op: str, **more: Any) -> dict[str, Any]:
                asked.append((op, more))
                if not answers:
                    raise Wanted
                return answers.pop(0)

            asked: list[tuple[str, dict[str, Any]]] = []
            monkeypatch.setattr(amend, "_ask", ask)
            try:
                return run(*words, "--data-dir", str(running.node.directory.path))
            except Wanted:
                op, more = asked[0]
                answers.append(await request(running.node.directory, op, timeout=5, **more))
                return run(*words, "--data-dir", str(running.node.directory.path))

        class Wanted(Exception):
            pass

        new = [key("elector").node.hex(), key("a").node.hex()]
        changes = ["--elector", new[0], "--elector", new[1], "--threshold", "deficit_mean=0.5"]
        assert await command(other, "make", str(file), *changes) == 0
        assert "deficit_mean = 0.5" in json.loads(file.read_text())["says"]
        with pytest.raises(Unavailable, match="no elector"):
            await command(other, "sign", str(file))
        with pytest.raises(Unavailable, match="quorum"):
            await command(other, "submit", str(file))
        assert await command(elector, "sign", str(file)) == 0
        assert await command(other, "submit", str(file)) == 0
        assert elector.elector is not None
        await cluster.cut()
        replica = other.node.log.replica
        height = len(replica.cuts)
        assert replica.electors_at(height) == cluster.domain.electors
        assert replica.electors_at(height + 1) == tuple(sorted(key(name).node for name in ("elector", "a")))
        assert replica.thresholds_at(height + 1).deficit_mean == 500_000
        with pytest.raises(Unavailable, match="number 2"):
            await command(elector, "submit", str(file))
    capsys.readouterr()


async def test_nonsense_is_told(tmp_path: Path, faults: Faults) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        await running.nursery.start(control_socket.run, running.node)
        for body, why in (("zz", "hexadecimal"), (7, "hexadecimal"), ("90", "amendment"), ("", "amendment")):
            with pytest.raises(Unavailable, match=why):
                await request(running.node.directory, "amend_sign", timeout=5, body=body)
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"[" * 100_000, b'{"body": "90", "signatures": {}}'])
def test_a_file_that_is_none_is_told(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "amendment.json"
    file.write_bytes(content)
    assert run("sign", str(file), "--data-dir", str(tmp_path)) == 2
    assert "not an amendment" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["", "nan", "inf", "0.0000001", "1e9999999"])
def test_a_threshold_that_is_no_number_is_told(value: str) -> None:
    with pytest.raises(UserError, match="six decimals"):
        amend._micro("deficit_mean", value)


def test_a_refusal_does_not_blame_a_missing_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = DataDirectory(tmp_path / "node")
    directory.create()
    directory.identity()
    file = tmp_path / "amendment.json"
    made = Amendment.make(digest("domain"), 1, [key("e1").node], THRESHOLDS)
    file.write_text(json.dumps({"body": made.body.hex(), "signatures": {}}))
    with serving(directory, lambda request: {"error": "2 signatures are no quorum of 4 electors"}):
        assert run("submit", str(file), "--data-dir", str(directory.path)) == 2
    said = capsys.readouterr().err
    assert "no quorum" in said
    assert "farflung run" not in said
