"""``python -m roundelay``: the same as the command ``roundelay``."""

from roundelay.cli import main

if __name__ == "__main__":
    main()
