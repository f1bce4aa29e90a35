"""Errors for the person at the keyboard: one line that names the value and what is allowed or what to do."""


class UserError(ValueError):
    """Something the user can put right. The CLI prints `error: <message>` and exits 1, no traceback."""
