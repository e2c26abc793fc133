"""``farflung proofs calibrate`` with the real child, and what a domain.toml makes of its result."""

from __future__ import annotations

import contextlib
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from node.cli import main
from node.domain import domain_toml
from node.errors import UserError
from node.evaluation import limit_calibration
from node.starter import __file__ as starter
from proofs.checks import FLOAT32_THRESHOLDS
from proofs.limits import STATISTICS
from protocol.domain import Thresholds
from tests.node.workers import vllm_child

pytestmark = pytest.mark.timeout(900)  # a child of its own loads torch, and transformers where it is
MODEL = Path(starter).parent
FEW = ("--groups", "2", "--forged", "1", "--group-size", "4", "--tokens", "4", "--learning-rate", "3e-4")
NAMES = [name for name, _ in Thresholds.SCHEMA]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short calibration."""
    folder = tmp_path_factory.mktemp("calibration") / "out"
    prompts = folder.with_name("prompts.txt")
    prompts.write_text("State the final answer: 12 + 30 =\nCalculate 99 - 18 =\n")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main.main(["proofs", "calibrate", str(MODEL), "-o", str(folder), "--prompts", str(prompts), *FEW]) == 0
    assert "ask for more with --groups" in said.getvalue()
    return folder


def test_it_writes_limits_figures_and_a_report(calibrated: Path) -> None:
    found = json.loads((calibrated / "calibration.json").read_text())
    assert list(found["thresholds"]) == NAMES
    assert found["pairs"].keys() == found["honest"].keys()
    for pair in found["pairs"].values():  # a domain's limits are those of the engine that needs the widest
        assert all(pair[name] <= found["thresholds"][name] for name in ("mantissa_mean", "logprob_error"))
    assert found["honest"].keys() == set(found["engines"])
    assert all(row["groups"] == 2 for row in found["honest"].values())
    assert found["honest_refused"] == 0
    caught = {row["name"]: row for row in found["forgers"]}
    assert len(caught) == 23
    # So few tokens give limits that are wide, but not for what is no proof at all.
    for name, by in (
        ("constant polynomial", "activations"),
        ("missing chunks", "malformed"),
        ("modulus 1", "malformed"),
    ):
        assert (caught[name]["until"], caught[name]["by"]) == (1, by)
        assert max(caught[name]["area"].values()) == 1.0
    section = tomllib.loads((calibrated / "thresholds.toml").read_text())["thresholds"]
    assert list(section) == NAMES
    assert all(round(section[name] * 1_000_000) == found["thresholds"][name] for name in NAMES)
    report = (calibrated / "report.html").read_text()
    assert report.count("<svg") == len(caught)
    assert all(one.name in report for one in STATISTICS)


def parse(folder: Path, text: str) -> domain_toml.Founding:
    return domain_toml.parse(f'name = "x"\nmodel = "{MODEL}"\n{text}\n[[task]]\nname = "gcd"\n', folder / "domain.toml")


def test_a_domain_takes_dtype_and_limits_from_it(calibrated: Path) -> None:
    assert parse(calibrated, "").thresholds == FLOAT32_THRESHOLDS
    found = parse(calibrated, 'calibration = "calibration.json"')
    told = json.loads((calibrated / "calibration.json").read_text())
    assert found.thresholds.to_value() == list(told["thresholds"].values())
    assert found.dtype == "float32"
    one = domain_toml.parse(
        f'name = "x"\nmodel = "{MODEL}"\ncalibration = "calibration.json"\n[[task]]\nname = "gcd"\n'
        "[thresholds]\nlogprob_error = 0.25\n",
        calibrated / "domain.toml",
    )
    assert one.thresholds.logprob_error == 250_000
    assert one.thresholds.deficit_clip == found.thresholds.deficit_clip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "is no calibration"),
        ({"dtype": "float8"}, "a value that no domain can have"),
        ({"thresholds": {}}, "is no calibration"),
        ({"thresholds": dict.fromkeys(NAMES, -1)}, "a value that no domain can have"),
    ],
)
def test_other_files_are_no_calibration(
    tmp_path: Path, calibrated: Path, change: dict[str, Any] | None, said: str
) -> None:
    good = json.loads((calibrated / "calibration.json").read_text())
    text = "[" if change is None else json.dumps({**good, **change})
    (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(UserError, match=said):
        parse(tmp_path, 'calibration = "calibration.json"')


def test_mistakes_are_one_line(tmp_path: Path, calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    for words in (
        [str(MODEL), "-o", str(calibrated)],
        [str(tmp_path), "-o", out],
        [str(MODEL), "-o", out, "--groups", "0"],
        [str(MODEL), "-o", out, "--learning-rate", "7"],
        [str(MODEL), "-o", out, "--prompts", str(tmp_path / "none.txt")],
        [str(MODEL), "-o", out, "--prompts", str(empty)],
    ):
        assert main.main(["proofs", "calibrate", *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith("farflung: ")
        assert len(said.splitlines()) == 1
    assert not Path(out).exists()


def test_prompts_are_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert limit_calibration.read_prompts(file) == ["one", "two"]
    assert limit_calibration.read_prompts(None) == []


@pytest.mark.slow
@pytest.mark.skipif(not vllm_child.INSTALLED, reason=vllm_child.REASON)
def test_vllm_is_an_engine_among_the_others(tmp_path: Path) -> None:
    vllm_child.folder(tmp_path / "llama", vllm_child.TINY_LLAMA, seed=3)
    few = ("--groups", "2", "--forged", "1", "--group-size", "2", "--tokens", "8")
    assert main.main(["proofs", "calibrate", str(tmp_path / "llama"), "-o", str(tmp_path / "out"), *few]) == 0
    found = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert "vllm" in found["engines"]
    assert found["pairs"].keys() == set(found["engines"])
    assert found["honest"]["vllm"]["groups"] == 2
    assert found["honest"]["vllm"]["differ"] == 0
