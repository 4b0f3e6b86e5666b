"""What the commands share: how they end, and outputs that appear complete or not at all."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from titanlite.runtime.errors import ConfigError, UserError


def run_command(main: Callable[[Sequence[str]], None]) -> None:
    """Run it and end the process: 0; 2 after a problem of the configuration, 1 after another error of the user's."""
    code = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is cleaned up
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    sys.exit(code)


def require_new(out: Path) -> None:
    """Raise UserError where `out` exists: nothing is overwritten."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists already and is not overwritten: remove it, or write another --out")


@contextmanager
def appears_complete(out: Path) -> Iterator[Path]:
    """A path beside `out` for a file or folder; renamed to `out` in the end, removed after an error."""
    temporary = out.with_name(f"{out.name}.incomplete-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        require_new(out)
        os.rename(temporary, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        elif temporary.exists():
            temporary.unlink()
