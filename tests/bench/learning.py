"""How well the learning engine does: ``python -m tests.bench.learning [--json] [--only PART,…]``.

``trainer_vs_trl``         for each model and kind of lengths the trainer's response tokens a second over those of TRL's
                           GRPOTrainer on the same completions (``learning_trainer``; targets 1.2 on mixed lengths, 1 on
                           equal ones). Needs ``--trl``
``generation_vs_vllm``     response tokens a second of the engine child, sampler and proofs included, over those of bare
                           vLLM on the same prompts (``learning_generation``; target 0.95). Needs vLLM and ``--model``
``trainer_idle_share``     the share of its time in which the trainer of a devnet with two inference nodes waits for
                           rollouts (``learning_idle``)
``reward_by_async_level``  the mean reward of the last version on questions that no step asked, after training on
                           rollouts of a fixed age (``async_levels``; level 2 is to end within noise of level 0)
``details``                all that each part found
``missing``                for each part without a figure, why; its figure is null

Parts are named as their figures are. Each runs as a process of its own, one after the other, and can be run alone under
the name in brackets. All of them take about an hour on two cores; figures from a busy machine say little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.processes import Failed, Missing

ROOT: Final = Path(__file__).resolve().parents[2]
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the parts are run with."""

    model: Path | None
    trl: str | None
    vllm: str
    threads: int
    steps: int
    seeds: int
    plot: Path | None


def run(python: str, module: str, *arguments: str) -> Found:
    """What ``python -m module … --json`` prints. Raises ``Failed``."""
    done = subprocess.run(
        [python, "-m", f"tests.bench.{module}", *arguments, "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{module} ended with {done.returncode}: {last_line(done.stderr)}")
    lines = done.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("{"))  # libraries print before it
    found: Found = json.loads("\n".join(lines[begin:]))
    return found


def last_line(text: str) -> str:
    """What a process said at last, on one line."""
    return (text.strip().splitlines() or ["it said nothing"])[-1][:300]


def trainer(setting: Setting) -> tuple[Any, Found]:
    """Part ``trainer_vs_trl``."""
    if setting.trl is None:
        raise Missing("name the Python of a virtual environment with TRL (--trl)")
    model = [] if setting.model is None else ["--model", str(setting.model)]
    found = run(sys.executable, "learning_trainer", "--trl", setting.trl, "--threads", str(setting.threads), *model)
    ratios = {name: {kind: round(each["ratio"], 3) for kind, each in kinds.items()} for name, kinds in found.items()}
    return ratios, found


def generation(setting: Setting) -> tuple[Any, Found]:
    """Part ``generation_vs_vllm``."""
    if setting.model is None:
        raise Missing("name a Hugging Face folder whose attention heads vLLM supports (--model)")
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([setting.vllm, "-c", probe], check=False).returncode:
        raise Missing(f"vllm is not installed for {setting.vllm} (--vllm names another Python)")
    found = run(setting.vllm, "learning_generation", str(setting.model), "--threads", str(setting.threads))
    return found["ratio"], found


def idle(setting: Setting) -> tuple[Any, Found]:
    """Part ``trainer_idle_share``."""
    found = run(sys.executable, "learning_idle")
    return found["idle"], found


def levels(setting: Setting) -> tuple[Any, Found]:
    """Part ``reward_by_async_level``."""
    plot = [] if setting.plot is None else ["--plot", str(setting.plot.absolute())]
    found = run(sys.executable, "async_levels", "--steps", str(setting.steps), "--seeds", str(setting.seeds), *plot)
    return {level: round(statistics.fmean(each), 4) for level, each in found["final"].items()}, found


PARTS: Final[dict[str, Callable[[Setting], tuple[Any, Found]]]] = {
    "trainer_vs_trl": trainer,
    "generation_vs_vllm": generation,
    "trainer_idle_share": idle,
    "reward_by_async_level": levels,
}


def measure(setting: Setting, parts: Sequence[str]) -> Found:
    """The figures of ``parts``, null for the others and for what cannot run here, with the reason."""
    figures: Found = {}
    details: Found = {}
    missing: dict[str, str] = {}
    for name, part in PARTS.items():
        figures[name] = None
        if name not in parts:
            missing[name] = "not asked for (--only)"
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            figures[name], details[name] = part(setting)
        except (Missing, Failed) as why:
            missing[name] = str(why)
            print(f"{name}: no figure: {why}", file=sys.stderr, flush=True)
    return {**figures, "details": details, "missing": missing, "load_average": round(os.getloadavg()[0], 2)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,…", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder (SmolLM2-135M), beside the starter model")
    parser.add_argument("--trl", metavar="PYTHON", help="the Python of a virtual environment with TRL")
    parser.add_argument("--vllm", metavar="PYTHON", default=sys.executable, help="one with vLLM (default: this one)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=60, help="steps of each run by async level (default 60)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each async level (default 3)")
    parser.add_argument("--plot", type=Path, help="where to draw the reward curves; needs matplotlib")
    asked = parser.parse_args()
    parts = asked.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)!r}")
    setting = Setting(asked.model, asked.trl, asked.vllm, asked.threads, asked.steps, asked.seeds, asked.plot)
    found = measure(setting, parts)
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    for name in PARTS:
        print(f"{name:<23} {json.dumps(found[name])} {found['missing'].get(name, '')}")


if __name__ == "__main__":
    main()
