"""spec-server: a language model server whose speculative decoding keeps its state."""

__version__ = "0.1.0"
