"""``farflung proofs calibrate``: runs the calibration child and writes limits, figures and a report.

The folder gets ``thresholds.toml`` (a ``[thresholds]`` section, to be put into a ``domain.toml``), ``calibration.json``
(all figures; a ``domain.toml`` may name it as its ``calibration``) and ``report.html``. Limits are worked out for each
pair of a generating engine and the float32 audit, and once more for all of them: a domain's, since a submission does
not say what made it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import trio

from node import __version__
from node.errors import UserError, os_errors
from node.roles.engine_client import vllm_environment, vllm_installed
from node.starter import defaults
from node.store.durable_files import write_new
from node.telemetry.plot import Series, legend, page, plot
from node.workers.child_messages import (
    AskOther,
    ConfigureEngine,
    Figures,
    MeasureForged,
    MeasureHonest,
    MeasureOther,
    PrepareCalibration,
    StoreJudge,
)
from node.workers.child_process import OpenWorker, Worker, WorkerError, open_worker
from proofs import limits as figures
from protocol.constants import MILLION
from protocol.domain import Recipe, Thresholds

PREPARE_TIMEOUT: Final = 3_600.0
WORK_TIMEOUT: Final = 3_600.0
AT_ONCE: Final = 4
"""Groups of one call to the child."""
AT_ONCE_VLLM: Final = 32
"""Groups of one call to vLLM, which batches them by itself."""
EVENTS: Final = 10
"""Wrong choices that an honest engine's tokens may have by the limit: with fewer, it is chance that sets the limit."""
STYLES: Final = ("c1", "c2", "c4", "c2 faint")


@dataclass(frozen=True, slots=True)
class CalibrationWanted:
    """What to measure; see ``farflung proofs calibrate --help``."""

    model: Path
    dtype: str = "float32"
    groups: int = 64
    forged: int = 8
    group_size: int = 8
    tokens: int = 64
    threads: int = 1
    learning_rate: float = 1e-6
    prompts: Path | None = None

    def recipe(self) -> Recipe:
        """The recipe that authors and trainer follow. Raises ``UserError``."""
        rate = round(self.learning_rate * 10**12)
        if min(self.groups, self.forged, self.threads) < 1 or not 1 <= self.group_size <= 256 or self.tokens < 1:
            raise UserError("groups, forgeries, responses, tokens and threads are counted from 1", "ask for more")
        if not 0 < rate <= 10**12:
            raise UserError(f"--learning-rate {self.learning_rate}: expected more than 0 and at most 1")
        return replace(
            defaults.RECIPE,
            group_size=self.group_size,
            max_prompt_tokens=256,
            max_response_tokens=self.tokens,
            learning_rate=rate,
        )


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file, one a line; none where there is no file: the child makes some. Raises ``UserError``."""
    if path is None:
        return []
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})", "name a text file with a prompt on each line") from None
    if not lines:
        raise UserError(f"{path}: there is no prompt in it", "write one on each line")
    return lines


async def calibrate(
    wanted: CalibrationWanted, out: Path, note: Callable[[str], None], open_worker: OpenWorker = open_worker
) -> dict[str, Any]:
    """Measure, and write the three files into the new folder ``out``. Returns what calibration.json holds."""
    recipe = wanted.recipe()
    prompts = await trio.to_thread.run_sync(_check, wanted, out)
    try:
        found = await _measure(wanted, recipe, prompts, note, open_worker)
    except WorkerError as error:
        if error.kind == "user":
            raise UserError(str(error).split(": prepare: ", 1)[-1]) from None
        raise UserError(f"the model cannot be measured: {error}", "see farflung doctor") from None
    await trio.to_thread.run_sync(_write, out, found)
    return found


def _check(wanted: CalibrationWanted, out: Path) -> list[str]:
    """The prompts. Raises ``UserError`` for what would come to nothing in the end."""
    if out.exists():
        raise UserError(f"{out}: it is there already and is not overwritten", "name another folder")
    if not (wanted.model / "config.json").is_file():
        raise UserError(f"{wanted.model}: there is no config.json in it", "name a Hugging Face model's folder")
    return read_prompts(wanted.prompts)


def _write(out: Path, found: Mapping[str, Any]) -> None:
    with os_errors(out, "cannot be made", "name another folder"):
        out.mkdir(parents=True)
    write_new(out / "calibration.json", (json.dumps(found, indent=1) + "\n").encode(), mode=0o644)
    write_new(out / "thresholds.toml", toml(found).encode(), mode=0o644)
    write_new(out / "report.html", render(found).encode(), mode=0o644)


async def _measure(
    wanted: CalibrationWanted,
    recipe: Recipe,
    prompts: Sequence[str],
    note: Callable[[str], None],
    open_worker: OpenWorker,
) -> dict[str, Any]:
    honest: dict[str, list[Figures]] = {}
    forged: dict[str, list[Figures]] = {}
    async with open_worker("node.workers.calibration_child", name="calibration") as worker:
        note(f"loading {wanted.model} and training the versions that stale weights come from")
        model = str(wanted.model.absolute())
        request = PrepareCalibration(model, wanted.dtype, recipe, list(prompts), wanted.threads)
        about = await worker.call(request, timeout=PREPARE_TIMEOUT)
        engines = sorted({engine for engine, _, _ in about.ways})
        for engine in engines:
            ways = [number for number, (name, _, _) in enumerate(about.ways) if name == engine]
            for place, start in enumerate(range(0, wanted.groups, AT_ONCE)):
                count = min(AT_ONCE, wanted.groups - start)
                way = ways[place % len(ways)]
                rows = await worker.call(MeasureHonest(way, start, count), timeout=WORK_TIMEOUT)
                honest.setdefault(engine, []).extend(rows)
            note(f"{len(honest[engine])} honest groups by {engine}")
        if vllm_installed():
            try:
                honest["vllm"] = await _by_vllm(wanted, recipe, worker, open_worker)
            except WorkerError as error:
                if error.kind != "user":
                    raise
                note(f"without vLLM: {str(error).split(': configure: ', 1)[-1]}")
            else:
                engines = sorted([*engines, "vllm"])
                note(f"{len(honest['vllm'])} honest groups by vllm")
        # Forgers of the same prompts one after the other: many begin with the same tokens, and the child keeps those.
        for start in range(0, wanted.forged, AT_ONCE):
            count = min(AT_ONCE, wanted.forged - start)
            for name, _ in about.forgers:
                rows = await worker.call(MeasureForged(name, start, count), timeout=WORK_TIMEOUT)
                forged.setdefault(name, []).extend(rows)
            note(f"{start + count} groups by each of {len(forged)} forgers")
    limits = figures.thresholds(honest, forged)
    least = min(sum(row[0] for row in rows) for rows in honest.values())
    if limits.deficit_honest * least < EVENTS * MILLION:
        note(f"{least} honest tokens of an engine are few, so that limits are wide: ask for more with --groups")
    everybody = [row for part in honest.values() for row in part]
    refused = sum(figures.run([[row]], limits).reasons != ("ok",) for row in everybody)
    return {
        "agent": f"farflung/{__version__}",
        "model": str(wanted.model),
        "dtype": wanted.dtype,
        "emulated": about.emulated,
        "engines": engines,
        "learning_rate": wanted.learning_rate,
        "thresholds": _named(limits),
        "pairs": {engine: _named(figures.thresholds({engine: rows}, forged)) for engine, rows in honest.items()},
        "honest": {engine: _summary(rows) for engine, rows in honest.items()},
        "honest_groups": len(everybody),
        "honest_refused": refused,
        "honest_refused_upper": figures.upper_bound(refused, len(everybody)),
        "forgers": [_forger(name, saves, everybody, forged[name], limits) for name, saves in about.forgers],
    }


async def _by_vllm(wanted: CalibrationWanted, recipe: Recipe, worker: Worker, open_worker: OpenWorker) -> list[Figures]:
    """The rows of honest groups that vLLM wrote with the weights of the calibration child ``worker``."""
    rows: list[Figures] = []
    with TemporaryDirectory(prefix="farflung-calibration-") as folder:
        environment = vllm_environment(wanted.threads, Path(folder) / "cache")
        version = await worker.call(StoreJudge(folder), timeout=WORK_TIMEOUT)
        async with open_worker("node.workers.vllm_child", name="vllm engine", environment=environment) as vllm:
            request = ConfigureEngine(
                config=str(wanted.model.absolute() / "config.json"),
                tokenizer=str(wanted.model.absolute() / "tokenizer.json"),
                recipe=recipe,
                dtype=wanted.dtype,
                threads=wanted.threads,
            )
            await vllm.call(request, timeout=PREPARE_TIMEOUT)
            await vllm.call(version, timeout=PREPARE_TIMEOUT)
            for start in range(0, wanted.groups, AT_ONCE_VLLM):
                count = min(AT_ONCE_VLLM, wanted.groups - start)
                asked = await worker.call(AskOther(start, count), timeout=WORK_TIMEOUT)
                written = await vllm.call(asked, timeout=WORK_TIMEOUT)
                found = await worker.call(MeasureOther(start, written.groups), timeout=WORK_TIMEOUT)
                rows.extend(found)
    return rows


def _named(limits: Thresholds) -> dict[str, int]:
    return dict(zip((name for name, _ in Thresholds.SCHEMA), limits.to_value(), strict=True))


def _summary(rows: Sequence[Figures]) -> dict[str, Any]:
    tokens = sum(row[0] for row in rows)
    return {
        "groups": len(rows),
        "tokens": tokens,
        "differ": sum(len(row[1]) for row in rows) / tokens,
        **{f"largest {one.name}": max(map(one.of, rows)) for one in figures.STATISTICS},
    }


def _forger(
    name: str, saves: str, honest: Sequence[Figures], rows: Sequence[Figures], limits: Thresholds
) -> dict[str, Any]:
    alone = [figures.run([[row]], limits) for row in rows]
    chain = figures.run([[row] for row in rows], limits)
    curves = {
        one.name: figures.roc([one.of(row) for row in honest], [one.of(row) for row in rows])
        for one in figures.STATISTICS
    }
    return {
        "name": name,
        "saves": saves,
        "groups": len(rows),
        "caught": sum(found.until is not None for found in alone),
        "until": chain.until,
        "by": chain.reasons[-1] if chain.until is not None else "nothing",
        **_summary(rows),
        "roc": curves,
        "area": {key: figures.area(points) for key, points in curves.items()},
    }


def toml(found: Mapping[str, Any]) -> str:
    """The ``[thresholds]`` section of a ``domain.toml``."""
    lines = [
        f"# Calibrated by {found['agent']} for {found['dtype']} audited in float32.",
        f"# Engines: {', '.join(found['engines'])}.",
        f"# {found['honest_refused']} of {found['honest_groups']} honest groups exceed them.",
        "[thresholds]",
    ]
    for name, value in found["thresholds"].items():
        whole, rest = divmod(value, MILLION)
        lines.append(f"{name} = {whole}.{rest:06d}".rstrip("0").rstrip("."))
    return "\n".join(lines) + "\n"


def render(found: Mapping[str, Any]) -> str:
    """The report: one HTML file that needs nothing else."""
    names = [one.name for one in figures.STATISTICS]
    columns = {"domain": found["thresholds"], **found["pairs"]}
    limits = [(name, *(f"{column[name] / MILLION:g}" for column in columns.values())) for name in found["thresholds"]]
    engines = [
        (
            *(engine, row["groups"], f"{row['tokens']:,}", f"{row['differ']:.2e}"),
            *(f"{row[f'largest {name}']:.3g}" for name in names),
        )
        for engine, row in found["honest"].items()
    ]
    forgers = [
        (
            *(row["name"], row["saves"], f"{row['caught']} of {row['groups']}"),
            *("never" if row["until"] is None else row["until"], row["by"]),
            *(f"{row['area'][name]:.3f}" for name in names),
        )
        for row in found["forgers"]
    ]
    how = ", with bfloat16 emulated by rounding" if found["emulated"] else ""
    compared = ("engine", "groups", "tokens", "tokens that differ", *(f"largest {name}" for name in names))
    caught = ("forger", "saves", "caught by one audit", "submissions until caught", "for")
    return page(
        "Farflung calibration",
        f"<header><h1>Calibration of {escape(Path(found['model']).name)}</h1>"
        f"<p>Generated in {found['dtype']}{how}, audited in float32. {found['honest_refused']} of "
        f"{found['honest_groups']} honest groups exceed the limits: a rate of at most "
        f"{found['honest_refused_upper']:.2g} (95 %).</p></header>\n"
        "<section><h2>Limits</h2><p>The domain's, and what each engine would need by itself against an audit in "
        f"float32.</p>{_table(('limit', *columns), limits)}</section>\n"
        f"<section><h2>Honest engines</h2>{_table(compared, engines)}</section>\n"
        f"<section><h2>Forgers</h2>{_table((*caught, *(f'area, {name}' for name in names)), forgers)}</section>\n"
        "<section><h2>ROC curves</h2><p>Share of forged groups found against share of honest groups blamed, as the "
        f"limit of one statistic moves.</p>{''.join(map(_roc_plot, found['forgers']))}</section>",
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    titles = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _roc_plot(row: Mapping[str, Any]) -> str:
    series = [
        Series(name, [(x, y) for x, y in points], style)
        for (name, points), style in zip(row["roc"].items(), STYLES, strict=True)
    ]
    drawn = plot(series, size=(420, 260), title=f"ROC of {row['name']}", x_label="honest groups blamed")
    return f"<figure><figcaption>{escape(row['name'])}</figcaption>{legend(series)}{drawn}</figure>"
