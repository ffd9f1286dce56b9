"""`python -m moco`, for torchrun."""

from moco.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
