"""`airmoe report`: runs -> tables and figures as Markdown, LaTeX and one HTML page.

reading.py (usage.py)     run folders -> a record
record.py                 what is kept of runs; report.json
groups.py                 runs that share a table, and their names
tables.py                 a table of each; paper.py: the paper's numbers and claims beside them
figures.py (drawing.py)   their figures; granularity.py: a fit, usage.py: maps
rendering.py              all of it as a report, and by templates/ as files
"""

from __future__ import annotations

from airmoe.experiments.report.rendering import Written, write_report

__all__ = ["Written", "write_report"]
