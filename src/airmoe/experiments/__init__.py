"""Comparisons and measurements: `airmoe suite | report | bench | flops | doctor`."""
