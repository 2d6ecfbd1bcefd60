"""`airmoe report`: runs -> tables and figures as Markdown, LaTeX and one HTML page.

run folders -> reading.py -> record.py (report.json) -> groups.py, fair.py -> contents.py
-> document.py -> markdown.py, latex.py, html.py
"""

from __future__ import annotations

from airmoe.experiments.report.writing import Written, write_report

__all__ = ["Written", "write_report"]
