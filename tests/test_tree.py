"""The project as a whole: imports go one way, importing is light, no file names a machine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "airmoe"

# The parts of airmoe, lowest first: each may import only earlier ones.
ORDER = (
    "errors",
    "transformers_internals",
    "config",
    "files",
    "distributed",
    "kernels",
    "flops",
    "routers",
    "moe",
    "losses",
    "metrics",
    "data",
    "model",
    "training",
    "adapt",
    "experiments",
    "commands",
    "cli",
    "__main__",
)
# Text preparation must run without the model, so it may import less.
NARROWER = {"data": ("errors", "config", "files")}


def part_of(module: str) -> str:
    """`airmoe.routers.air` -> `routers`; `airmoe` itself -> the empty string."""
    return module.partition(".")[2].partition(".")[0]


def imported_modules(node: ast.AST) -> list[str]:
    """What a statement imports; ruff refuses relative imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    if node.module != "airmoe":
        return [str(node.module)]
    # `from airmoe import routers` means `airmoe.routers`.
    return [f"airmoe.{alias.name}" for alias in node.names if alias.name != "__version__"]


def wrong_imports(source: str, module: str) -> list[str]:
    """One sentence per import of `source` that goes up or sideways, also inside functions."""
    here = part_of(module)
    if not here:
        return []  # airmoe/__init__.py gathers the public names of everything
    if here not in ORDER:
        return [f"{module}: '{here}' has no place in ORDER (tests/test_tree.py); give it one"]
    allowed = {here, *NARROWER.get(here, ORDER[: ORDER.index(here)])}
    return [
        f"{module}, line {getattr(node, 'lineno', 0)}: imports {target}, but '{here}' may import "
        f"only {', '.join(part for part in ORDER if part in allowed)}"
        for node in ast.walk(ast.parse(source))
        for target in imported_modules(node)
        if target.split(".")[0] == "airmoe" and part_of(target) not in allowed
    ]


def test_imports_go_one_way() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, f"no modules under {PACKAGE}"
    wrong = []
    for file in files:
        names = file.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(names).removesuffix(".__init__")
        wrong += wrong_imports(file.read_text(encoding="utf-8"), module)
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "line", "offender"),
    [
        ("airmoe.kernels.noise", "from airmoe.routers.air import AirRouter", "airmoe.routers.air"),
        ("airmoe.routers.air", "import airmoe.moe", "airmoe.moe"),
        ("airmoe.losses", "def f():\n    from airmoe import metrics", "airmoe.metrics"),
        ("airmoe.moe.layer", "from airmoe import MoELayer", "airmoe.MoELayer"),
        ("airmoe.moe.layer", "import airmoe", "airmoe"),
        ("airmoe.data.shards", "from airmoe.routers import ROUTERS", "airmoe.routers"),
        ("airmoe.stray", "import torch", "no place in ORDER"),
        ("airmoe.moe.x", "from airmoe.kernels import cells", None),
        ("airmoe", "from airmoe.cli import app", None),
        ("airmoe.errors", "import airmoenot.cli", None),
    ],
)
def test_wrong_imports_are_found(module: str, line: str, offender: str | None) -> None:
    found = wrong_imports(line, module)
    assert len(found) == (offender is not None)
    assert offender is None or offender in found[0]


IMPORT_PROBE = """
import sys, time
sys.modules["triton"] = None  # importing triton now raises
import torch
threads, random = torch.get_num_threads(), torch.get_rng_state()
start = time.process_time()
import airmoe
seconds = time.process_time() - start
assert airmoe.__file__, "airmoe has no __init__.py"
heavy = {"transformers", "accelerate", "datasets", "matplotlib", "typer", "tensorboard"}
assert not heavy & set(sys.modules), f"import airmoe loads {heavy & set(sys.modules)}"
assert not torch.cuda.is_initialized(), "import airmoe starts CUDA"
assert torch.get_num_threads() == threads, "import airmoe changes the number of threads"
assert torch.equal(torch.get_rng_state(), random), "import airmoe draws random numbers"
assert torch.get_default_dtype() == torch.float32, "import airmoe changes the default dtype"
assert seconds < 2, f"import airmoe takes {seconds:.1f} s of CPU beyond torch"
"""


def test_importing_airmoe_is_light_and_needs_neither_triton_nor_cuda() -> None:
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "CUDA_VISIBLE_DEVICES": ""}
    probe = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE], env=env, capture_output=True, text=True
    )
    assert probe.returncode == 0, probe.stderr


MACHINE_PATH = re.compile(r"(?<![\w.-])/(?:work|root|home)/")


def test_no_file_contains_a_machine_path() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            lines = (ROOT / name).read_text(encoding="utf-8", errors="ignore").splitlines()
            found += [
                f"{name}:{at}: {text.strip()}"
                for at, text in enumerate(lines, 1)
                if MACHINE_PATH.search(text)
            ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("lock", ["cpu", "oldest"])
def test_the_lock_pins_every_package(lock: str) -> None:
    """All extras and their dependencies, by exact version and without the address of an index."""
    text = (ROOT / "constraints" / f"{lock}.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    wrong = [line for line in lines if not re.match(r"[a-z0-9.-]+==[0-9][\w.]*( ; .+)?$", line)]
    assert not wrong
    pinned = {line.partition("==")[0] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    todo = [Requirement(text) for text in chain(project["dependencies"], *extras)]
    seen: set[str] = {"airmoe"}
    while todo:
        name = canonicalize_name(todo.pop().name)
        if name in seen:
            continue
        seen.add(name)
        if f"transformers=={version('transformers')}" not in lines:
            continue  # another lock is installed: its dependencies are unknown here
        with suppress(PackageNotFoundError):  # some extras are not installed here
            needs = map(Requirement, requires(name) or ())
            todo += [need for need in needs if need.marker is None or need.marker.evaluate()]
    assert len(seen) > 20 and not seen - pinned - {"airmoe"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_unwritten_memory_is_nan(device: str) -> None:
    """conftest.py fills it, so that an unwritten output cannot pass a comparison."""
    written = torch.zeros(3, device=device)
    makers = (
        torch.empty_like(written),
        written.new_empty(3),
        torch.empty(3, device=device),
        torch.empty(3, dtype=torch.bfloat16, device=device),
    )
    assert all(tensor.isnan().all() for tensor in makers)
    assert (torch.empty(3, dtype=torch.int64, device=device) == torch.iinfo(torch.int64).max).all()
