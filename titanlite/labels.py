"""The one label that is no token."""

IGNORE_INDEX = -100
"""Label of a position that takes no part in the loss."""
