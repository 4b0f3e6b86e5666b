"""titanlite: pretraining of language models on any device mesh, with the same numbers on each of them."""

__version__ = "0.1.0"
