"""What decoders with pre-normalised blocks, rotary embeddings, grouped-query attention and SwiGLU share.

A family made of these parts has a module of the same name for each, with what is special about it.
"""
