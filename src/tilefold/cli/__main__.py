"""``python -m tilefold.cli``."""

from tilefold.cli import main

if __name__ == "__main__":
    main()
