"""Text of messages."""


def counted(count: int, noun: str) -> str:
    """A number and its noun: 1 file, 2,000 files, 3 meshes, 4 processes."""
    plural = f"{noun}es" if noun.endswith(("ch", "sh", "ss")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
