"""Lines of a figure can be told from each other without their colours."""

from __future__ import annotations

import pytest

from airmoe.experiments.report.names import styles_of

MAIN = ["air", "peer", "hierarchical", "exact", "coarse"]
ABLATIONS = ["air", "no_projection", "static", "expert_choice", "euclidean"]


@pytest.mark.parametrize(
    "variants",
    [
        MAIN,
        ABLATIONS,
        [*MAIN, *ABLATIONS[1:]],
        ["air", "peer", "air (one)", "air (two)", "exact (one)", "coarse"],
        [f"q{2**power}" for power in range(10)],
        [*MAIN, *(f"air ({index})" for index in range(10))],
    ],
)
def test_markers_and_dashes_differ(variants: list[str]) -> None:
    styles = styles_of(variants)
    assert sorted(styles) == sorted(variants)
    assert len({style.marker for style in styles.values()}) == len(variants)
    assert len({style.dashes for style in styles.values()}) == len(variants)


def test_more_lines_than_markers_still_differ() -> None:
    styles = styles_of([f"run {index}" for index in range(60)])
    assert len({(style.marker, style.dashes) for style in styles.values()}) == 60


def test_known_variants_keep_their_style() -> None:
    alone = {name: styles_of([name])[name] for name in MAIN}
    assert styles_of(["run 1", "run 2", *MAIN]).items() >= alone.items()
