"""Methods as files: discovery, checks, parameters and compositions."""
