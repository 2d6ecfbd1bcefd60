"""The activations of `expert_tables.py` and their derivatives, for use inside Triton kernels."""
# pyright: reportGeneralTypeIssues=none

from __future__ import annotations

import triton
import triton.language as tl

from airmoe.kernels.expert_tables import Activation

# Kernels are compiled for one activation: the code is a compile-time constant.
ACTIVATION_CODES: dict[Activation, int] = {
    "swiglu": 0,
    "geglu": 1,
    "gelu": 2,
    "relu": 3,
    "silu": 4,
    "geglu_tanh": 5,
}
_SWIGLU = tl.constexpr(ACTIVATION_CODES["swiglu"])
_GEGLU = tl.constexpr(ACTIVATION_CODES["geglu"])
_GELU = tl.constexpr(ACTIVATION_CODES["gelu"])
_RELU = tl.constexpr(ACTIVATION_CODES["relu"])
_SILU = tl.constexpr(ACTIVATION_CODES["silu"])
_GEGLU_TANH = tl.constexpr(ACTIVATION_CODES["geglu_tanh"])
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_TANH_CUBIC = tl.constexpr(0.044715)
_LARGEST_SQUARE = tl.constexpr(1e6)  # of its input: the sigmoid is 0 or 1 long before
_NORMAL_PEAK = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi), the normal density at 0


# log2(e) as a float32, and what is missing of it.
_LOG2_E = tl.constexpr(1.44269502162933349609375)
_LOG2_E_REST = tl.constexpr(1.92596299112661746887e-8)
_LN_2 = tl.constexpr(0.6931471805599453)
_LARGEST_POWER = tl.constexpr(128.0)  # of 2: infinite, or 0, and neither can be corrected


@triton.jit
def activate(up, gate, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """act(up), or act(gate) * up for gated activations; float32, elementwise.

    Pass `up` again as `gate` where there is none. EXACT is for operands that are float32
    themselves: the quick exponential is off by some of their last bits.
    """
    if ACTIVATION == _SWIGLU:
        active = _silu(gate, EXACT) * up
    elif ACTIVATION == _GEGLU:
        active = _gelu(gate) * up
    elif ACTIVATION == _GEGLU_TANH:
        active = _gelu_tanh_and_slope(gate, EXACT)[0] * up
    elif ACTIVATION == _GELU:
        active = _gelu(up)
    elif ACTIVATION == _SILU:
        active = _silu(up, EXACT)
    else:
        tl.static_assert(ACTIVATION == _RELU)
        active = tl.where(up <= 0.0, 0.0, up)  # this way round NaN stays NaN
    return active


@triton.jit
def activation_grads(up, gate, grad, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """(active, gradient of up, gradient of gate), given the gradient of `active`; float32.

    For plain activations the third is meaningless: ignore it.
    """
    if ACTIVATION == _SWIGLU:
        plain, slope = _silu_and_slope(gate, EXACT)
        active, grad_up, grad_gate = plain * up, grad * plain, grad * up * slope
    elif ACTIVATION == _GEGLU:
        plain, slope = _gelu_and_slope(gate, EXACT)
        active, grad_up, grad_gate = plain * up, grad * plain, grad * up * slope
    elif ACTIVATION == _GEGLU_TANH:
        plain, slope = _gelu_tanh_and_slope(gate, EXACT)
        active, grad_up, grad_gate = plain * up, grad * plain, grad * up * slope
    elif ACTIVATION == _GELU:
        active, slope = _gelu_and_slope(up, EXACT)
        grad_up = grad * slope
        grad_gate = grad_up
    elif ACTIVATION == _SILU:
        active, slope = _silu_and_slope(up, EXACT)
        grad_up = grad * slope
        grad_gate = grad_up
    else:
        tl.static_assert(ACTIVATION == _RELU)
        active = tl.where(up <= 0.0, 0.0, up)
        grad_up = tl.where(up <= 0.0, 0.0, grad)
        grad_gate = grad_up
    return active, grad_up, grad_gate


@triton.jit
def _exp(values, EXACT: tl.constexpr):
    if EXACT:
        power = values * _LOG2_E
        rest = tl.fma(values, _LOG2_E, -power) + values * _LOG2_E_REST
        result = tl.exp2(power)
        corrected = result + result * (rest * _LN_2)
        result = tl.where(tl.abs(power) < _LARGEST_POWER, corrected, result)
    else:
        result = tl.exp(values)
    return result


@triton.jit
def _silu(values, EXACT: tl.constexpr):
    below = 1.0 + _exp(-values, EXACT)
    if EXACT:
        result = tl.div_rn(values, below)
    else:
        result = values / below
    return result


@triton.jit
def _silu_and_slope(values, EXACT: tl.constexpr):
    below = 1.0 + _exp(-values, EXACT)
    if EXACT:
        sigmoid = tl.div_rn(1.0, below)
    else:
        sigmoid = 1.0 / below
    return values * sigmoid, sigmoid * (1.0 + values * (1.0 - sigmoid))


@triton.jit
def _gelu(values):
    return 0.5 * values * (1.0 + tl.erf(values * _SQRT_HALF))


@triton.jit
def _gelu_and_slope(values, EXACT: tl.constexpr):
    below = 0.5 * (1.0 + tl.erf(values * _SQRT_HALF))  # normal distribution function
    density = _exp(-0.5 * values * values, EXACT) * _NORMAL_PEAK
    return values * below, below + values * density


@triton.jit
def _gelu_tanh_and_slope(values, EXACT: tl.constexpr):
    """0.5 (1 + tanh(z)) is the sigmoid of 2 z, which needs no tanh."""
    squares = tl.minimum(values * values, _LARGEST_SQUARE)
    # Constants on the right: on the left, Triton 3.9's interpreter makes a constant of the product.
    below = 1.0 + _exp(values * -_TANH_SCALE * (1.0 + squares * _TANH_CUBIC), EXACT)
    if EXACT:
        sigmoid = tl.div_rn(1.0, below)
    else:
        sigmoid = 1.0 / below
    inner = (1.0 + squares * (3.0 * _TANH_CUBIC)) * _TANH_SCALE
    plain = values * sigmoid  # before `inner`, so that a sigmoid of 0 meets nothing infinite
    return plain, sigmoid + plain * (1.0 - sigmoid) * inner
