"""Pages with a part that a script writes, between two comments that name it."""

from __future__ import annotations

from airmoe.errors import ConfigError


def with_part(file: str, page: str, name: str, text: str) -> str:
    """The page of a file, with what is between `<!-- NAME: start -->` and its end replaced."""
    start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        rule = f"must have the lines {start} and {end}, in this order"
        raise ConfigError("page", file, rule, "Add them where the part belongs.")
    return f"{before}{start}\n{text}\n{end}{after}"
