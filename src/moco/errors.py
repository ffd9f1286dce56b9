"""The exceptions that the command line turns into one clear line."""


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where, and what to do about it. Exit status 2."""


class TrainingError(RuntimeError):
    """Training cannot go on, though the input was well-formed. The message is one line. Exit status 1."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after the step was finished and saved. The message says how to resume.

    status: exit status, 130 after Ctrl-C and 143 after SIGTERM.
    """

    def __init__(self, message: str, status: int = 130) -> None:
        super().__init__(message)
        self.status = status
