"""Fixtures for launchers on this machine."""

from tests.distributed.conftest import start

__all__ = ["start"]
