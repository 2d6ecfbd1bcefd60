"""`airmoe report`: runs -> tables and figures as Markdown, LaTeX and one HTML page.

run folders -> reading.py -> record.py (report.json) -> groups.py -> contents.py, which asks
tables.py, claims.py, beside_paper.py and figures/ -> rendering.py, with templates/
"""

from __future__ import annotations

from airmoe.experiments.report.writing import Written, write_report

__all__ = ["Written", "write_report"]
