"""Folders that appear whole or not at all."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary folder beside `folder` to write into; it takes that name, and the place of what is there, at the end.

    After an error there is nothing new. A process that is killed leaves the temporary one, `.NAME.tmp-PID`.
    """
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if folder.exists():
            old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
            os.rename(folder, old)
            os.rename(temporary, folder)
            shutil.rmtree(old)
        else:
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
