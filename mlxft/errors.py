"""The errors a person is meant to read, and the exit code each one ends a command with."""

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_INPUT = 2
EXIT_GUARD = 3


class MlxftError(Exception):
    """An expected end of a command: its text is for the user, its `exit_code` for the shell."""

    exit_code = EXIT_FAULT


class InputError(MlxftError):
    """Something the user gave is wrong: a config key, a data row, a file.

    The text says what is wrong, where (file and line, or config key), and what to do.
    """

    exit_code = EXIT_INPUT


class GuardStop(MlxftError):
    """A guard stopped the run (non-finite gradients, no memory, a lost rank); checkpoints are intact."""

    exit_code = EXIT_GUARD


class Interrupted(MlxftError):
    """The run was interrupted by a signal and has saved; `exit_code` is 128 + the signal's number."""

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.exit_code = 128 + signum
