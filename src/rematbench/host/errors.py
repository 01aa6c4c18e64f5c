"""The error that a person can mend: a wrong input, as one clear line."""


class UserError(ValueError):
    """A wrong input. The command line prints the text and ends with exit code 2."""
