"""A process that makes chunks of rows: they come in on standard input, what is made of them goes out.

Run as a program by `mlxft.data.workers`. It imports nothing of the program that started it, and ends when
its input does.
"""

import os
import pickle
import signal
import sys
import traceback

from mlxft.errors import InputError


def main() -> None:
    """Serves until the input ends: first a ChunkEncoder's arguments, then chunks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; whoever started this one ends it
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not mix with results
    from mlxft.data.chunks import ChunkEncoder

    encode = ChunkEncoder(*pickle.load(sys.stdin.buffer))
    while True:
        try:
            chunk = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = encode(chunk)
        except InputError as error:
            result = error
        except Exception:
            result = RuntimeError(traceback.format_exc())
        pickle.dump(result, results, pickle.HIGHEST_PROTOCOL)
        results.flush()


if __name__ == "__main__":
    main()
