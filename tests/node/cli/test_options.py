"""Which folder and which configuration a command works with."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from node.cli import options
from node.config import Config
from node.errors import UserError


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run = options.add_command(parser.add_subparsers(), "run", lambda chosen: 0, help="")
    options.add_config(run)
    return parser.parse_args(["run", *arguments])


def test_the_folder_comes_from_flag_variable_service_or_home(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = tmp_path / "service"
    assert options.data_directory(parse(), service).path == home / ".local/share/farflung/node"
    service.mkdir()
    assert options.data_directory(parse(), service).path == service
    monkeypatch.setenv("FARFLUNG_DATA_DIR", str(tmp_path / "variable"))
    assert options.data_directory(parse(), service).path == tmp_path / "variable"
    assert options.data_directory(parse("--data-dir", str(tmp_path / "flag"))).path == tmp_path / "flag"


def test_a_command_that_needs_a_node_says_where_none_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no node lives here"):
        options.existing_directory(parse("--data-dir", str(tmp_path)))


def test_every_flag_reaches_the_configuration(tmp_path: Path) -> None:
    flags = ["--name", "n", "--listen", "/ip4/127.0.0.1/tcp/1", "--listen", "/ip4/127.0.0.1/tcp/2"]
    flags += ["--willing", "relay,inference", "--log-level", "debug", "--threads", "3"]
    arguments = parse("--data-dir", str(tmp_path), *flags)
    assert options.configuration(arguments, options.data_directory(arguments)) == Config(
        name="n",
        listen=("/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2"),
        willing=("relay", "inference"),
        log_level="debug",
        threads=3,
    )


@pytest.mark.parametrize("flag", [("--threads", "x"), ("--listen", "x"), ("--bootstrap", "x"), ("--willing", "x")])
def test_a_wrong_flag_is_named(flag: tuple[str, str], tmp_path: Path) -> None:
    arguments = parse("--data-dir", str(tmp_path), *flag)
    with pytest.raises(UserError, match=f"^{flag[0]}: "):
        options.configuration(arguments, options.data_directory(arguments))


def test_the_file_is_the_folders_unless_another_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("own", "variable", "flag"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "farflung.toml").write_text(f'name = "{place}"')

    def name(*arguments: str) -> str:
        parsed = parse("--data-dir", str(tmp_path / "own"), *arguments)
        return options.configuration(parsed, options.data_directory(parsed)).name

    assert name() == "own"
    monkeypatch.setenv("FARFLUNG_CONFIG", str(tmp_path / "variable" / "farflung.toml"))
    assert name() == "variable"
    assert name("--config", str(tmp_path / "flag" / "farflung.toml")) == "flag"
    with pytest.raises(UserError, match="there is no such file"):
        name("--config", str(tmp_path / "missing.toml"))


def test_an_empty_folder_name_is_a_mistake() -> None:
    with pytest.raises(UserError, match="--data-dir: the name is empty"):
        options.data_directory(argparse.Namespace(data_dir=""))


def test_counts_for_people() -> None:
    assert [options.counted(count, "error") for count in (0, 1, 2)] == ["0 errors", "1 error", "2 errors"]
