"""One plan on one problem: its result, its bytes, its verdict."""
