"""The FLOP ledger: what one token costs, operator by operator, counted twice.

*Algorithmic* is the paper's convention: M candidates scored, K experts run. *Executed* is what our
kernels compute: where tokens share a pool, all experts of that pool. Everything follows from the
settings; no model is built, so a large one needs neither memory nor time.
"""

from airmoe.metrics.flops.convention import Operation
from airmoe.metrics.flops.count import LanguageModelConfig, count_flops, count_layer
from airmoe.metrics.flops.ledger import COLUMNS, PARTS, Column, Cost, Ledger, Part, Term
from airmoe.metrics.flops.router_parts import RouterCount
from airmoe.metrics.flops.routers import count_router
from airmoe.metrics.flops.workload import RouterLosses, Workload

__all__ = [
    "COLUMNS",
    "PARTS",
    "Column",
    "Cost",
    "LanguageModelConfig",
    "Ledger",
    "Operation",
    "Part",
    "RouterCount",
    "RouterLosses",
    "Term",
    "Workload",
    "count_flops",
    "count_layer",
    "count_router",
]
