"""docs/results.md and the README's table are what the committed result files say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from airmoe.experiments import preset
from airmoe.experiments.report.reading import read_everything
from airmoe.experiments.report.records import plan_records, write_records
from airmoe.files import read_json
from tests.docs.common import ROOT, load_script
from tests.experiments.report_toys import WIKIPEDIA_HASH, write_suite

draw_results = load_script("docs/draw_results.py")


def drawn_figures(root: Path) -> set[str]:
    folder = root / "docs" / "figures" / "results"
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*.svg")}


def test_page_and_figures_are_those_of_the_files() -> None:
    pytest.importorskip("matplotlib")
    made = draw_results.sections()
    page = draw_results.page(made)
    found = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert page == found, "run: python docs/draw_results.py"
    files = drawn_figures(ROOT)
    assert files == {
        f"{section.name}/{drawing.picture.name}.svg"
        for section in made
        for drawing in section.report.drawings
    }
    assert files == set(re.findall(r"\]\(figures/results/([\w/-]+\.svg)\)", page))


def test_readme_is_that_of_the_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert draw_results.readme() == readme, "run: python docs/draw_results.py"


def test_every_result_file_is_read() -> None:
    record = read_everything([ROOT / "results"])
    assert record.problems == []
    files = [path for path in (ROOT / "results").rglob("*.json") if "report" not in path.parts]
    assert len(record.runs) >= len(files) > 0


def test_the_presets_are_those_of_the_records() -> None:
    """Otherwise a new run would be another row than the same run before, and refused its file."""
    runs = read_everything([ROOT / "results" / "wikipedia" / "main"]).runs
    assert len(runs) >= 5
    for run in runs:
        assert run.variant is not None
        assert run.settings.model == preset("small", run.variant).model, run.name


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results that are hoped for, at toy size, drawn by the script."""
    pytest.importorskip("matplotlib")
    root = tmp_path_factory.mktemp("root")
    changed = ["training.epochs=1", "data.folder=data/wikipedia", "data.corpus=data/text"]
    changed += ["training.precision=bf16"]
    about = {"machine": {"device": "NVIDIA H200", "count": 1}, "data_sha256": WIKIPEDIA_HASH}
    runs = {
        "air": {"perplexity": [31.0, 33.0], "test": [41.0, 41.0], "memory": 9.5, "about": about},
        "exact": {"perplexity": [30.0, 30.0], "test": [40.25, 40.25], "about": about},
    }
    suite = root / "runs" / "suite"
    write_suite(suite, "main", runs, seeds=(42, 43), name="small", overrides=changed)
    write_records(plan_records(read_everything([suite]).runs, root / "results" / "wikipedia"))
    (root / "results" / "other").mkdir()
    shutil.copy(
        root / "results" / "wikipedia" / "main" / "air-seed42.json", root / "results" / "other"
    )
    (root / "docs").mkdir()
    (root / "README.md").write_text(
        "Before\n<!-- quality: start -->\nold\n<!-- quality: end -->\nAfter\n", encoding="utf-8"
    )
    draw_results.main(root)
    return root


def test_the_readme_says_how_long_air_takes(root: Path) -> None:
    seconds = read_json(root / "runs" / "suite" / "air-seed42" / "result.json")["seconds"]
    text = (root / "README.md").read_text(encoding="utf-8")
    assert "with compilers and evaluations but without preparing the text, AIR" in text
    assert f"AIR took at most {seconds / 60:.1f} min." in text


def test_a_section_per_folder(root: Path) -> None:
    page = (root / "docs" / "results.md").read_text(encoding="utf-8")
    assert re.findall(r"^## .*", page, re.MULTILINE) == [
        "## Other",
        "## Wikipedia",
    ]
    section = page.partition("## Wikipedia\n\n")[2]
    assert section.startswith("### Main: small, English Wikipedia")
    assert "| AIR | 2 | 32.00 ± 1.41 | 41.00 |" in section
    assert "#### The paper beside ours" in section and "WikiText-103's validation split" in section
    assert page.count("Every number is taken at the evaluation") == 1
    links = set(re.findall(r"\]\(figures/results/([\w/-]+\.svg)\)", page))
    assert links == drawn_figures(root) and {link.partition("/")[0] for link in links} == {
        "other",
        "wikipedia",
    }


def test_the_table_of_the_readme(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    assert text.startswith("Before\n<!-- quality: start -->\nPreset small, English Wikipedia 2015")
    assert text.endswith("\n<!-- quality: end -->\nAfter\n") and "old" not in text
    lines = text.splitlines()
    about = next(line for line in lines if line.startswith("Preset small"))
    assert "184,320 tokens, bf16, 1 x NVIDIA H200, torch 2.13.0." in about
    assert (
        "WikiText-103, each at its best point of 1,210,000,000 tokens; ours had 0.0152 %" in about
    )
    head, _, air, exact = (line for line in lines if line.startswith("|"))
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "method",
        "seeds",
        "perplexity",
        "perplexity, test text",
        "the paper's",
        "FLOPs at minimum, algorithmic (T)",
        "time at minimum (s)",
        "tokens/s (k)",
        "peak memory (GiB)",
        "dead experts (%)",
        "entropy, nats",
        "overlap",
    ]
    assert air == (
        "| AIR | 2 | 32.00 ± 1.41 | 41.00 | 21.82 | 1.843 | 46.1 | 4.00 | 9.50 | 2.0 "
        "| 7.90 of 11.09 | 0.70 |"
    )
    assert "Test text: WikiText-103's validation split" in text
    assert exact.startswith("| *Exact granular*‡ | *2* | *30.00* | *40.25* | *21.34* |")
