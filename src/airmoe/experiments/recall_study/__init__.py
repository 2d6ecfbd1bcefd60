"""`airmoe recall`: how much of exact routing other coarse stages would find, without training them.

run folder -> command.py -> states.py (what a trained router sees) -> study.py (the stages, row by
row) -> record.py (recall.json) -> reading.py (back, checked). The maths: cells.py, rankings.py,
overlap.py.
"""
