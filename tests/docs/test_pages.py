"""What the pages say is true: code runs, quotes are current, names, links and numbers exist."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from airmoe import ROUTERS, AirRouter
from airmoe.cli import app
from airmoe.kernels.noise import normal
from airmoe.model import model_size, parameter_counts
from airmoe.moe.recomputation import KEPT_PLANS
from tests.docs.common import (
    PAGES,
    ROOT,
    TRAINING,
    code_blocks,
    load_script,
    run_blocks,
)

quotes = load_script("docs/quotes.py")
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKING = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "benchmarks" / "README.md",
]
LONGEST = {"README.md": 120}  # lines; any other page: 250
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.fixture
def _routers_restored() -> Iterator[None]:
    before = dict(ROUTERS)
    yield
    ROUTERS.clear()
    ROUTERS.update(before)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in TRAINING], ids=lambda page: page.name
)
@pytest.mark.usefixtures("_routers_restored")
def test_code_runs(page: Path) -> None:
    """Those about training run in test_train.py."""
    blocks = code_blocks(page)
    assert all(language == "python" for language, _ in blocks)
    run_blocks(blocks, page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quotes_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert quotes.refreshed(text) == text, "run: python docs/quotes.py"


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    for label, target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file, name = (page.parent / path).resolve() if path else page, label.strip("`")
        assert file.exists(), f"{page.name}: [{label}]({target})"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: [{label}]({target})"
        if label.startswith("`") and target.endswith(".py") and not name.endswith(".py"):
            defined = rf"^ *(def |class |)({'|'.join(name.split('.'))})\b[(:= ]"
            found = re.findall(defined, file.read_text(encoding="utf-8"), re.MULTILINE)
            assert {one for _, one in found} == {*name.split(".")}, f"{name} in {target}"


def test_names_in_the_tables_of_the_method_occur_in_the_source() -> None:
    tables = (ROOT / "docs" / "method.md").read_text(encoding="utf-8").partition("## The def")[0]
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    known = set(re.findall(r"\w+", code))
    names = {
        name
        for row in re.findall(r"^\|.*\|$", tables, re.MULTILINE)
        for quoted in re.findall(r"`([^`]+)`", row)
        for name in re.findall(r"[A-Za-z_]{2,}", quoted)
    }
    assert len(names) > 30
    assert names <= known, names - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_stay_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST.get(page.name, 250)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^ {4}|`)make ([\w-]+)", page.read_text(encoding="utf-8"), re.M))
    assert named <= targets


def test_the_tree_of_the_readme_exists() -> None:
    tree = README.partition("## Where things are")[2].partition("[Method]")[0]
    lines = re.findall(r"^ {4,6}((?:[\w.]+/? )*[\w./]+)(?: {2,}|$)", tree, re.MULTILINE)
    names = [name for line in lines for name in line.split()]
    assert len(names) >= 13
    for name in names:
        assert (ROOT / "src" / "airmoe" / name).exists() or (ROOT / name).exists(), name
    folders = {file.name for file in (ROOT / "src" / "airmoe").iterdir() if file.is_dir()}
    assert folders - {"__pycache__"} <= {name.rstrip("/") for name in names}
    examples = re.findall(r"\w+\.py", tree.partition("examples/")[2].partition("\n")[0])
    assert set(examples) == {file.name for file in (ROOT / "examples").glob("*.py")}
    commands = re.search(r"airmoe (\w+(?: \| \w+)+)", tree)
    known = {command.name or command.callback.__name__ for command in app.registered_commands}  # pyright: ignore
    assert commands and set(commands[1].split(" | ")) == known


def test_numbers_on_the_first_screen() -> None:
    text = " ".join(README.partition("![")[0].split())
    on_gpu = {result["key"]: result for result in stored("paper")["results"]}
    keys = ("air", "hierarchical", "peer")
    air, hierarchical, peer = (on_gpu[key]["median"]["total_ms"] for key in keys)
    assert f"**{air:.1f} ms** for {stored('paper')['shape']['num_tokens']:,} tokens" in text
    assert f"{hierarchical / air:.1f} times faster than hierarchical routing" in text
    assert f"{peer / air:.1f} times faster than PEER" in text
    assert on_gpu["listing"]["reason"].endswith("about 195 GiB") and "about 195 GiB" in text
    on_cpu = {result["name"]: result for result in stored("cpu")["results"]}
    air, peer = on_cpu["AIR"], on_cpu["PEER-pytorch"]
    seconds, theirs = (result["median"]["total_ms"] / 1e3 for result in (air, peer))
    assert f"**{seconds:.2f} s** for {stored('cpu')['shape']['num_tokens']:,} tokens" in text
    assert f"{theirs / seconds:.1f} times faster than PEER-pytorch" in text
    assert f"1/{peer['peak_bytes'] / air['peak_bytes']:.0f} of the memory" in text
    (step,) = (r for r in stored("step-text")["results"] if r["key"] == "compiled-graph")
    speed = sorted(step["work"]["tokens_per_second"])[len(step["work"]["tokens_per_second"]) // 2]
    assert f"{round(speed, -3):,.0f} tokens per second" in text


def stored(name: str) -> dict[str, Any]:
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def test_numbers_in_decisions() -> None:
    text = " ".join((ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").split())
    config = AirRouter.Config(dim=1, num_experts=1, top_k=1, num_codewords=1, shortlist_size=1)
    assert f"at most {KEPT_PLANS} forwards" in text
    assert (config.jitter_std, config.dead_below, config.centroid_init) == (0.01, 1.0, "unit")
    largest = math.sqrt(-2 * math.log(0.5 / 2**16))
    assert f"never exceeds {math.ceil(100 * largest) / 100} standard deviations" in text
    keys = torch.arange(2000, dtype=torch.int32).unsqueeze(-1)
    assert normal(keys, torch.arange(2000)).abs().max() <= largest + 1e-6


def test_numbers_of_the_model_in_decisions() -> None:
    text = " ".join((ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").split())
    small, medium, large = (model_size(name) for name in ("small", "medium", "large"))
    totals = [f"{parameter_counts(size).total / 1e6:.1f} M" for size in (small, medium, large)]
    assert f"ours has {totals[0]}" in text and f"ours are {totals[1]} and {totals[2]}" in text
    assert f"counted ({parameter_counts(small).active / 1e6:.1f} M" in text
    small.num_experts = 16_384
    assert f"16,384 experts ({parameter_counts(small).total / 1e6:.1f} M)" in text
    assert f"initializer_range` {small.initializer_range}" in text
    assert small.moe_layers == [8] and "the ninth of 16" in text


def anchors(page: Path) -> set[str]:
    """Names that GitHub gives the headings of a page."""
    titles = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
