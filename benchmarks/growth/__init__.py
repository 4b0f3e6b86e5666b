"""How costs grow with the number of ranks: one part of titanlite each, with simulated participants in one process."""
