"""What the kernels were built to reach on one H200, held against a run (full sizes only)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from airmoe.experiments.bench.report import GIB, Content, timed

AIR = "air-triton"
MOST_MS = {"paper": 12, "paper-16k": 9, "paper-768": 40, "paper-g256": 8}
Part = Literal["forward_ms", "total_ms"]


@dataclass(frozen=True)
class Promise:
    """One number and its limit."""

    text: str
    value: float
    limit: float
    better: Literal["lower", "higher"]

    @property
    def kept(self) -> bool:
        if self.better == "lower":
            return self.value <= self.limit
        return self.value >= self.limit

    @property
    def style(self) -> str:
        return "green" if self.kept else "bold red"

    def __str__(self) -> str:
        bound = "at most" if self.better == "lower" else "at least"
        verdict = "kept" if self.kept else "broken"
        return f"{self.text}: {self.value:,.3g} ({bound} {self.limit:,g}: {verdict})"


class Numbers:
    """Medians of a run; None where something was not measured."""

    def __init__(self, contents: Sequence[Content]) -> None:
        self.results = {
            (content["case"], result["key"]): result
            for content in contents
            for result in timed(content)
        }

    def ms(self, case: str, key: str, part: Part = "total_ms") -> float | None:
        result = self.results.get((case, key))
        return None if result is None else result["median"].get(part)

    def peak(self, case: str, key: str) -> float | None:
        result = self.results.get((case, key))
        return None if result is None else result["peak_bytes"]

    def tokens_per_second(self, wanted: str) -> float | None:
        """Of the fastest way to run a step with experts."""
        speeds = [
            median(result["work"]["tokens_per_second"])
            for (case, _), result in self.results.items()
            if case == wanted and result["role"] == "air"
        ]
        return max(speeds, default=None)


def kept_and_broken(contents: Sequence[Content]) -> list[Promise]:
    """All promises about what this run measured."""
    return [
        Promise(text, value, limit, better)
        for text, value, limit, better in _promised(Numbers(contents))
        if value is not None
    ]


def _promised(
    numbers: Numbers,
) -> Iterator[tuple[str, float | None, float, Literal["lower", "higher"]]]:
    for case, limit in MOST_MS.items():
        yield f"{case}: AIR, ms", numbers.ms(case, AIR), limit, "lower"
    peak = numbers.peak("paper", AIR)
    yield "paper: AIR, peak GiB", None if peak is None else peak / GIB, 3, "lower"
    paper = numbers.ms("paper", AIR)
    for case in ("paper-zipf", "paper-captured"):
        yield f"{case}: AIR, times paper", _ratio(numbers.ms(case, AIR), paper), 1.5, "lower"
    for key in ("peer", "exact"):
        gathered = f"{key}-gathered"
        faster = _ratio(numbers.ms("paper", gathered), numbers.ms("paper", key))
        memory = _ratio(numbers.peak("paper", key), numbers.peak("paper", gathered))
        yield f"paper: {key}, times as fast as gathered", faster, 3, "higher"
        yield f"paper: {key}, memory over gathered", memory, 0.1, "lower"
    small, large = "scaling-65536", "scaling-1048576"
    parts: dict[Part, float] = {"forward_ms": 1.3, "total_ms": 2.0}
    for part, limit in parts.items():
        growth = _ratio(numbers.ms(large, AIR, part), numbers.ms(small, AIR, part))
        yield f"AIR with 16 times the experts, {part} over {part}", growth, limit, "lower"
    exact, air = (numbers.ms("decode-8", key, "forward_ms") for key in ("exact", AIR))
    yield "decode-8: AIR, times as fast as exact", _ratio(exact, air), 10, "higher"
    for case in ("step", "step-text"):
        yield f"{case}: tokens/s", numbers.tokens_per_second(case), 600_000, "higher"


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
