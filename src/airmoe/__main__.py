"""`python -m airmoe`, for torchrun."""

from __future__ import annotations

from airmoe.cli import main

if __name__ == "__main__":
    main()
