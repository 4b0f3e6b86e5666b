"""Command: translate a TOML of torchtitan 0.2. `table` has the meaning of every key."""
