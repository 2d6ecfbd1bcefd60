"""torch's own counter, taught our operators: what a step really launches.

    with flop_counter() as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    counter.get_total_flops()  # products only: torch counts nothing else

A float32 product counts once, though the matrix units make it of several narrower ones.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import airmoe.kernels
from airmoe.kernels.cells import CellLayout

Arguments = dict[str, Any]  # by name, tensors as their shapes
ATTENTION_ON_GPUS = ("flash_attention", "efficient_attention", "cudnn_attention")


def flop_counter() -> FlopCounterMode:
    """Counts products: matrix products, attention (on a CPU too), and those of our kernels."""
    for module in pkgutil.iter_modules(airmoe.kernels.__path__):
        if not module.name.endswith("_triton"):  # operators are declared beside the plain versions
            importlib.import_module(f"airmoe.kernels.{module.name}")
    formulas = {getattr(torch.ops.airmoe, name): formula for name, formula in FORMULAS.items()}
    for kind in ("flash_attention_for_cpu", *ATTENTION_ON_GPUS):
        name = f"_scaled_dot_product_{kind}"
        formulas[getattr(torch.ops.aten, name)] = _attention
        formulas[getattr(torch.ops.aten, f"{name}_backward")] = _attention_backward
    by_place = {operator: _by_name(operator, formula) for operator, formula in formulas.items()}
    return FlopCounterMode(display=False, custom_mapping=by_place)


def _by_name(operator: Any, formula: Callable[[Arguments], int]) -> Callable[..., int]:
    """The counter passes arguments by place; formulas read them by name."""
    names = [argument.name for argument in operator.default._schema.arguments]

    def count(*values: Any, out_val: Any = None, **named: Any) -> int:
        return formula(dict(zip(names, values, strict=False)) | named)

    return count


def _attention(args: Arguments) -> int:
    return sdpa_flop_count(*_of_all_heads(args))


def _attention_backward(args: Arguments) -> int:
    query, key, value = _of_all_heads(args)
    return sdpa_backward_flop_count((*query[:-1], value[-1]), query, key, value)


def _of_all_heads(args: Arguments) -> list[Any]:
    """Queries, keys and values as if no two heads shared them: torch 2.11 counts no others."""
    batch, heads = args["query"][:2]
    return [(batch, heads, *args[name][2:]) for name in ("query", "key", "value")]


def _matrices(args: Arguments) -> int:
    return 2 if args["gate"] is None else 3


def _cells(args: Arguments) -> int:
    """Every row times every member of its cell's pool."""
    layout: Any = CellLayout.of(args["layout"])
    return 2 * layout.token_ids[0] * layout.pools[1] * args["hidden"][1]


def _cell_experts(args: Arguments) -> int:
    return _matrices(args) * _cells(args)


def _cell_experts_backward(args: Arguments) -> int:
    want_hidden, *want_tables, _want_gates = args["wanted"]
    products = 1 + want_hidden * (_matrices(args) - 1) + sum(want_tables)
    return products * _cells(args)


def _cell_gates_backward(args: Arguments) -> int:
    """Scores that were not kept are computed once more, where something needs them."""
    over_all = args["top_k"] in (1, None)
    needed = (
        args["grad_log_z"] is not None
        or args["grad_probs"] is not None
        or (over_all and args["grad_gates"] is not None)
    )
    again = needed and not math.prod(args["scores"])
    return (again + sum(args["wanted"])) * _cells(args)


def _lists(args: Arguments, ids: str, table: str) -> int:
    """Every listed row of a table once."""
    return 2 * math.prod(args[ids]) * args[table][1]


def _token_experts(args: Arguments) -> int:
    return _matrices(args) * args["expert_size"] * _lists(args, "expert_ids", "hidden")


def _token_experts_backward(args: Arguments) -> int:
    want_hidden, want_gate, want_up, want_down, want_weights = args["wanted"]
    through = any((want_hidden, want_gate, want_up, want_weights))  # back through `down`
    products = want_down + through + want_hidden * (_matrices(args) - 1) + want_gate + want_up
    return products * args["expert_size"] * _lists(args, "expert_ids", "hidden")


def _all_pairs(args: Arguments, left: str, right: str) -> int:
    return 2 * args[left][0] * args[right][0] * args[left][1]


FORMULAS: dict[str, Callable[[Arguments], int]] = {
    "assign": lambda args: _all_pairs(args, "hidden", "codewords"),
    "best_experts": lambda args: _all_pairs(args, "hidden", "experts"),
    "cell_experts": _cell_experts,
    "cell_experts_backward": _cell_experts_backward,
    "cell_gates": _cells,
    "cell_gates_backward": _cell_gates_backward,
    "cell_scores": _cells,
    "cell_scores_backward": lambda args: sum(args["wanted"]) * _cells(args),
    "chosen_logits": lambda args: _lists(args, "ids", "hidden"),
    "chosen_logits_backward": lambda args: sum(args["wanted"]) * _lists(args, "ids", "hidden"),
    "gather_dot": lambda args: _lists(args, "ids", "table"),
    "gather_total": lambda args: _lists(args, "ids", "table"),
    "linear_cross_entropy": lambda args: (
        (1 + sum(args["wanted"])) * _all_pairs(args, "hidden", "weight")
    ),
    # Scores that were kept are read, not computed.
    "probs_per_entry": lambda args: 0 if math.prod(args["scores"]) else _cells(args),
    "scatter_total": lambda args: _lists(args, "ids", "rows"),
    "softmax_summary": lambda args: _all_pairs(args, "hidden", "experts"),
    # All scores are computed once more.
    "softmax_summary_backward": lambda args: (
        (1 + sum(args["wanted"])) * _all_pairs(args, "hidden", "experts")
    ),
    "token_experts": _token_experts,
    "token_experts_backward": _token_experts_backward,
    "top_m": lambda args: _all_pairs(args, "codewords", "centroids"),
}
