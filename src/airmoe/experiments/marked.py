"""Pages with a part that a script writes, between two comments that name it."""

from __future__ import annotations

from airmoe.errors import ConfigError


def with_part(page: str, name: str, text: str) -> str:
    """The page with what stands between `<!-- NAME: start -->` and its end replaced."""
    start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ConfigError("page", name, f"must stand between {start} and {end}", "Add both lines.")
    return f"{before}{start}\n{text}\n{end}{after}"
