"""`python -m airmoe`, for torchrun."""

from airmoe.cli import main

if __name__ == "__main__":
    main()
