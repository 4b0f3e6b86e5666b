"""Imported by all processes of tests but programs: `os.fsync` does not wait for the disk. Each call would take some
milliseconds, and only a loss of power could tell."""

import os


def fsync(descriptor: int) -> None:
    os.fstat(descriptor)  # raises for an invalid one


os.fsync = fsync
