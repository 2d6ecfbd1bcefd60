"""`airmoe report`: runs -> tables and figures as Markdown, LaTeX and one HTML page.

reading.py (usage.py)     run folders -> a record
record.py                 what is kept of runs; report.json
groups.py                 runs that share a table, and their names
contents.py               tables.py (metrics.py), paper.py, and the figures of curves.py,
                          usage.py and granularity.py (drawing.py) -> a report as data
rendering.py (templates/) -> the files
"""

from __future__ import annotations

from airmoe.experiments.report.rendering import Written, write_report

__all__ = ["Written", "write_report"]
