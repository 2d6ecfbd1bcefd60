"""Tables over variants: one row each, mean and spread over seeds, the best in bold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from airmoe.experiments.report import metrics
from airmoe.experiments.report.corpora import known_text
from airmoe.experiments.report.document import Cell, Table
from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.metrics import Metric, Summary, summarize, unit_of, written
from airmoe.experiments.report.names import codebook_of, granularity_of, title_of
from airmoe.experiments.report.record import OLD_BALANCE, Run

MAIN = (
    metrics.PERPLEXITY,
    metrics.TEST,
    metrics.FLOPS,
    metrics.EXECUTED,
    metrics.SECONDS,
    metrics.SPEED,
    metrics.MEMORY,
    metrics.TOTAL,
    metrics.ACTIVE,
    metrics.DEAD,
    metrics.ENTROPY,
    metrics.OVERLAP,
)
ABLATIONS = (
    metrics.PERPLEXITY,
    metrics.TEST,
    metrics.FLOPS,
    metrics.SECONDS,
    metrics.SPEED,
    metrics.MEMORY,
    metrics.DEAD,
    metrics.OVERLAP,
    metrics.RECALL,
    metrics.ENTROPY,
)
CODEBOOK = (
    metrics.OVERLAP,
    metrics.RECALL,
    metrics.BOUND,
    metrics.PERPLEXITY,
    metrics.FLOPS,
    metrics.EXECUTED,
    metrics.SECONDS,
    metrics.DEAD,
)
GRANULARITY = (metrics.LOSS, metrics.PERPLEXITY, metrics.FLOPS, metrics.SECONDS, metrics.DEAD)
PERPLEXITIES = (metrics.PERPLEXITY, metrics.TEST)
AGREEMENT = (metrics.OVERLAP, metrics.RECALL)  # with exact routing
MOVED_BY_SEEDS = (
    *PERPLEXITIES,
    metrics.LOSS,
    metrics.DEAD,
    metrics.ENTROPY,
    metrics.OVERLAP,
    metrics.RECALL,
)

FUTURE_MARK, REFERENCE_MARK, WEAK_MARK = "†", "‡", "§"
FUTURE_NOTE = "† Expert choice sees later tokens of the text: its perplexity is not comparable."
REFERENCE_NOTE = "‡ Scores every expert: the reference, out of competition."
WEAK_NOTE = (
    "§ Balance loss with f summing to 1, K times weaker than now: does not compare with runs since."
)
MOST_DEAD = 0.05  # of the experts, where overlap still says something
COLLAPSE_NOTE = (
    "Overlap and mass recall beside more than 5 % dead experts are never bold: where few experts "
    "are left, lists find them easily."
)
SPREAD_NOTE = (
    "± is the sample standard deviation over the seeds; without it there is one, or all agree."
)


def main_table(group: Group) -> Table:
    return variant_table(group, MAIN, "All methods at their lowest validation perplexity.")


def ablation_table(group: Group) -> Table:
    return variant_table(group, ABLATIONS, "AIR without one of its parts.")


def variant_table(group: Group, columns: Sequence[Metric], caption: str) -> Table:
    """One row per variant."""
    variants = group.variants
    names = [_name_cell(variant, runs) for variant, runs in variants.items()]
    seeds = [_number_cell(len(runs), grey=is_reference(runs[0])) for runs in variants.values()]
    rows = [[name, count] for name, count in zip(names, seeds, strict=True)]
    return _filled(group, columns, caption, ["method", "seeds"], rows)


def granularity_table(group: Group) -> Table:
    rows = [
        [_number_cell(granularity_of(variant) or 0), _number_cell(len(runs))]
        for variant, runs in group.variants.items()
    ]
    return _filled(group, GRANULARITY, "Experts Q times as small.", ["Q", "seeds"], rows)


def codebook_table(group: Group) -> Table:
    rows = []
    for variant, runs in group.variants.items():
        book = codebook_of(variant)
        assert book is not None  # contents.py asks before
        sizes = (book.num_codewords, book.shortlist_size, len(runs))
        rows.append([_number_cell(size) for size in sizes])
    heads = ["codewords G", "shortlist M", "seeds"]
    return _filled(group, CODEBOOK, "Codewords and shortlists.", heads, rows)


def _filled(
    group: Group, columns: Sequence[Metric], caption: str, heads: list[str], rows: list[list[Cell]]
) -> Table:
    """The rows with a cell per metric, and the footnotes they need."""
    titles = list(heads)
    every = [run for runs in group.variants.values() for run in runs]
    shown = [metric for metric in columns if not metric.optional or summarize(metric, every)]
    for metric in shown:
        column = _column(metric, group)
        titles.append(column.title)
        for row, cell in zip(rows, column.cells, strict=True):
            row.append(cell)
    notes = note_on_test(every) if metrics.TEST in shown else []
    notes += [SPREAD_NOTE] if any(len(runs) > 1 for runs in group.variants.values()) else []
    notes += note_on_seeds(group, [metric for metric in shown if metric in PERPLEXITIES])
    notes += [FUTURE_NOTE] if any(sees_future(run) for run in every) else []
    notes += [REFERENCE_NOTE] if any(is_reference(run) for run in every) else []
    notes += [WEAK_NOTE] if any(run.convention == OLD_BALANCE for run in every) else []
    notes += note_on_collapse(group, shown)
    return Table(caption=caption, columns=titles, rows=rows, notes=notes)


def note_on_test(runs: Sequence[Run]) -> list[str]:
    """What the test text is, where a run was measured on one of another origin."""
    text = known_text(runs[0])
    measured = summarize(metrics.TEST, runs) is not None
    return [f"Test text: {text.test}."] if measured and text and text.test else []


def note_on_collapse(group: Group, shown: Sequence[Metric]) -> list[str]:
    """Which rows are out of the contest for the overlap."""
    found = [
        title_of(variant)
        for variant, runs in group.variants.items()
        if is_collapsed(runs) and any(summarize(one, runs) for one in AGREEMENT if one in shown)
    ]
    return [f"{COLLAPSE_NOTE} Here: {', '.join(found)}."] if found else []


def note_on_seeds(group: Group, shown: Sequence[Metric]) -> list[str]:
    """Where rows have different seeds: the perplexities of those with the seeds of every row."""
    seeds = {variant: {run.seed for run in runs} for variant, runs in group.variants.items()}
    shared = set.intersection(*seeds.values()) if seeds else set()
    more = {
        variant: [run for run in runs if run.seed in shared]
        for variant, runs in group.variants.items()
        if seeds[variant] != shared
    }
    if not shared or not more or not shown:
        return []
    named = f"seed{'' if len(shared) == 1 else 's'} {', '.join(map(str, sorted(shared)))}"
    found = [text for metric in shown if (text := _listed(metric, more))]
    return [f"With {named} alone, which every row has: {'; '.join(found)}."] if found else []


def _listed(metric: Metric, variants: Mapping[str, Sequence[Run]]) -> str:
    """Its value for each variant that has one; "" where none has."""
    found = {
        variant: one
        for variant, runs in variants.items()
        if (one := summarize(metric, runs)) is not None
    }
    unit = unit_of(metric.kind, [one.mean for one in found.values()])
    values = [
        f"{written(one, metric.kind, unit)} ({_marked(variant, variants[variant])})"
        for variant, one in found.items()
    ]
    return f"{metric.title} {', '.join(values)}" if values else ""


def _marked(variant: str, runs: Sequence[Run]) -> str:
    return f"{title_of(variant)}{FUTURE_MARK if sees_future(runs[0]) else ''}"


@dataclass(frozen=True)
class _Column:
    """A metric's title with its unit, and its cells in the order of the variants."""

    title: str
    cells: list[Cell]


def _column(metric: Metric, group: Group) -> _Column:
    found = {variant: summarize(metric, runs) for variant, runs in group.variants.items()}
    unit = unit_of(metric.kind, [one.mean for one in found.values() if one is not None])
    means = {  # as they are written: equal texts are equally good
        variant: written(Summary(one.mean, None, 1), metric.kind, unit)
        for variant, one in found.items()
        if one is not None
    }
    best = _best(metric, group, found)
    cells = []
    for variant, runs in group.variants.items():
        one, text = found[variant], written(found[variant], metric.kind, unit)
        ideal = metric.ideal(runs[0]) if metric.ideal is not None else None
        competes = _competes(metric, runs)
        cells.append(
            Cell(
                text=text if ideal is None else f"{text} of {ideal:.2f}",
                value=None if one is None else one.mean,
                bold=best is not None and competes and means.get(variant) == means[best],
                grey=is_reference(runs[0]),
                mark=FUTURE_MARK if metric in PERPLEXITIES and sees_future(runs[0]) else "",
            )
        )
    return _Column(f"{metric.title} ({unit.name})" if unit.name else metric.title, cells)


def _best(metric: Metric, group: Group, found: dict[str, Summary | None]) -> str | None:
    """The variant with the best mean; None without a contest that is fair."""
    means = {
        variant: one.mean
        for variant, runs in group.variants.items()
        if (one := found[variant]) is not None and _competes(metric, runs)
    }
    if metric.better is None or len(set(means.values())) < 2:
        return None
    competing = [group.variants[variant] for variant in means]
    if (
        metric in MOVED_BY_SEEDS
        and len({frozenset(run.seed for run in runs) for runs in competing}) > 1
    ):
        return None
    if metric in MOVED_BY_SEEDS and len({runs[0].convention for runs in competing} - {None}) > 1:
        return None
    if metric.ideal is not None and len({metric.ideal(runs[0]) for runs in competing}) > 1:
        return None
    return (min if metric.better == "low" else max)(means, key=means.__getitem__)


def _competes(metric: Metric, runs: Sequence[Run]) -> bool:
    not_comparable = metric in PERPLEXITIES and sees_future(runs[0])
    collapsed = metric in AGREEMENT and is_collapsed(runs)
    return not is_reference(runs[0]) and not not_comparable and not collapsed


def is_collapsed(runs: Sequence[Run]) -> bool:
    """Whether more experts are dead than an overlap can be judged beside; of any seed."""
    return any((metrics.DEAD.read(run) or 0.0) > MOST_DEAD for run in runs)


def is_reference(run: Run) -> bool:
    """Exact granular routing; as a point of the granularity suite it is in the contest."""
    return run.method == "exact" and granularity_of(run.variant) is None


def sees_future(run: Run) -> bool:
    """Whether experts choose tokens: then each token's routing depends on later ones."""
    model = run.config["model"]
    gate = (model.get("router_options") or {}).get("gate")
    return model.get("router") == "expert_choice" or gate == "expert_choice"


def _name_cell(variant: str, runs: Sequence[Run]) -> Cell:
    marks = FUTURE_MARK if sees_future(runs[0]) else ""
    grey = is_reference(runs[0])
    marks = REFERENCE_MARK if grey else marks
    marks += WEAK_MARK if runs[0].convention == OLD_BALANCE else ""
    return Cell(text=title_of(variant), grey=grey, mark=marks)


def _number_cell(value: float, *, grey: bool = False) -> Cell:
    return Cell(text=f"{value:,}", value=value, grey=grey)
