"""The exceptions that the command line turns into one clear line."""


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where, and what to do about it. Exit status 2."""


class TrainingError(RuntimeError):
    """Training cannot go on, though the input was well-formed. The message is one line. Exit status 1."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the step was finished and saved. The message says how to resume. Exit status 130."""
