"""From a JobConfig to finished parts: the only code that sees both."""
