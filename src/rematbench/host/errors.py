"""The error for wrong input."""


class UserError(ValueError):
    """Wrong input.  The command line prints the message as one line and exits with code 2."""
