"""`python -m rematbench`."""

from rematbench.cli import main

if __name__ == "__main__":
    main()
