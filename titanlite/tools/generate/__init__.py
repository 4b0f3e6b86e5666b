"""Text from a saved run: the command, and what it is made of."""
