"""The entry point of `python -m rematbench`."""

from rematbench.cli.app import main

if __name__ == "__main__":
    main()
