"""`airmoe report`: runs -> tables and figures as Markdown, LaTeX and one HTML page.

reading.py (finished.py)       run folders -> a record
record.py (usage.py)           what is kept of runs; report.json
groups.py (names.py)           runs that may stand in one table
contents.py                    tables.py, claims.py, paper.py and figures/ -> a report as data
rendering.py (templates/)      -> texts, which writing.py writes
"""

from __future__ import annotations

from airmoe.experiments.report.writing import Written, write_report

__all__ = ["Written", "write_report"]
