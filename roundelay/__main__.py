"""Run the command ``roundelay`` as ``python -m roundelay``."""

from roundelay.cli import main

if __name__ == "__main__":
    main()
