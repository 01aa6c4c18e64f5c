"""Property tests draw the same examples on every machine, and have no deadline."""

from hypothesis import settings

settings.register_profile("rematbench", deadline=None, derandomize=True)
settings.load_profile("rematbench")
