"""The evaluation of a plan on a problem: its result, its bytes, its verdict."""
