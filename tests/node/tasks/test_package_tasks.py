"""Tasks out of packages: a real one, as an installer leaves it, in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node.errors import UserError
from node.tasks import package_tasks, sandbox, task_service
from node.tasks.package_tasks import PackageTask
from node.tasks.task_service import TaskService
from tests.node.tasks.test_catalogue import row

needs_sandbox = pytest.mark.skipif(sandbox.available() is not None, reason=str(sandbox.available()))
CODE = """
import os, random

class Riddles:
    def __init__(self, parameters):
        self.most = parameters.get("most", 9)
        if self.most < 1:
            raise ValueError("most is less than 1")

    def question(self, seed):
        return f"What is {random.randint(0, self.most)} + {seed}?"

    def score(self, seed, response):
        match response:
            case "environment":
                return len([name for name in os.environ if name == "SECRET"])
            case "home":
                return os.path.exists(os.path.expanduser("~root"))
            case "fork":
                os.fork()
            case "nan":
                return float("nan")
            case "endless":
                return float("inf")
            case "words":
                return "good"
            case "nothing":
                return None
            case "loop":
                while True:
                    pass
        return {"right": 1, "half": 0.5, "more": 7, "less": -7}[response]
"""


def install(folder: Path, name: str = "farflung-riddles", version: str = "1.2.0") -> Path:
    """Lay a package out as pip does."""
    module = name.replace("-", "_")
    says = folder / f"{module}-{version}.dist-info"
    says.mkdir(parents=True)
    (says / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (says / "entry_points.txt").write_text(f"[farflung.tasks]\nriddles = {module}.tasks:Riddles\n")
    (folder / module).mkdir()
    # Outside the sandbox nothing imports it.
    (folder / module / "__init__.py").write_text("import os\nassert os.getuid() == 65534\n")
    (folder / module / "tasks.py").write_text(CODE)
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = install(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def riddles(**changes: Any) -> dict[str, Any]:
    return {**row("riddles", "package"), "version": "farflung-riddles==1.2.0", **changes}


def test_what_is_offered_is_found_without_importing_it(installed: Path) -> None:
    (offer,) = [offer for offer in package_tasks.offers() if offer.name == "riddles"]
    assert offer.pin == "farflung-riddles==1.2.0"
    assert package_tasks.choose("riddles", None) == package_tasks.pinned("riddles", offer.pin) == offer
    files, paths = package_tasks.locate(offer)
    assert files == [installed / "farflung_riddles", installed / "farflung_riddles-1.2.0.dist-info"]
    assert set(paths) == {installed}


def test_what_is_not_there_is_told_in_one_line(installed: Path) -> None:
    with pytest.raises(UserError, match=r"no installed package has a task 'riddle' \(did you mean riddles\?\)"):
        package_tasks.choose("riddle", None)
    with pytest.raises(UserError, match="no installed package has a task 'riddles' of other"):
        package_tasks.choose("riddles", "other")
    with pytest.raises(
        UserError, match=r"riddles comes in a package: farflung-riddles 1\.2\.0 is .* install farflung-rid"
    ):
        package_tasks.pinned("riddles", "farflung-riddles==1.3.0")
    with pytest.raises(UserError, match="nowhere is not installed; install nowhere==1"):
        package_tasks.pinned("riddles", "nowhere==1")
    with pytest.raises(UserError, match="instead of one package"):
        package_tasks.pinned("riddles", "a==1 b==1")
    install(installed, "other-riddles")
    with pytest.raises(
        UserError, match="farflung-riddles and other-riddles both have a task 'riddles'; write package ="
    ):
        package_tasks.choose("riddles", None)
    assert package_tasks.choose("riddles", "other-riddles").pin == "other-riddles==1.2.0"


def test_code_that_is_gone_is_named(installed: Path) -> None:
    offer = package_tasks.choose("riddles", None)
    (installed / "farflung_riddles").rename(installed / "gone")
    with pytest.raises(UserError, match=r"names farflung_riddles\.tasks:Riddles, which is not there"):
        package_tasks.locate(offer)


@pytest.mark.usefixtures("installed")
def test_it_needs_a_sandbox() -> None:
    with pytest.raises(UserError, match="runs its code, and so needs a sandbox"):
        PackageTask("riddles", "{}", "farflung-riddles==1.2.0", paths=(), sandboxed=False)


@needs_sandbox
@pytest.mark.usefixtures("installed")
async def test_questions_and_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    async with TaskService([row("chain_sum"), riddles(parameters='{"most": 3}')], limit=0.1) as tasks:
        (question,) = await tasks.questions([(1, 40)])
        assert question == (await tasks.questions([(1, 40)]))[0]
        assert question.endswith("+ 40?")
        responses = ["right", "half", "more", "less", "environment", "home", "fork", "unknown", "x" * 300_000]
        rewards = await tasks.score([(1, 0, response) for response in responses])
        assert rewards == [1_000_000, 500_000, 1_000_000, 0, 0, 0, 0, 0, 0]
        assert await tasks.score([(1, 0, "nan"), (1, 0, "loop"), (1, 0, "right")]) == [None, None, 1_000_000]
        odd = await tasks.score([(1, 0, "endless"), (1, 0, "words"), (1, 0, "nothing")])
        assert odd == [1_000_000, None, None]


@needs_sandbox
@pytest.mark.usefixtures("installed")
async def test_what_it_says_of_its_parameters_is_passed_on() -> None:
    message = (
        r"the task riddles of farflung-riddles==1\.2\.0 does not start with its parameters: ValueError: most is less"
    )
    with pytest.raises(UserError, match=message):
        await task_service.check([riddles(parameters='{"most": 0}')])
    with pytest.raises(
        UserError, match=r"farflung-riddles 1\.2\.0 is installed, the domain pins 2\.0; install farflung-riddles==2\.0"
    ):
        async with TaskService([riddles(version="farflung-riddles==2.0")]):
            pytest.fail("it started")
