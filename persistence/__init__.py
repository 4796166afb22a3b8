"""Slot files: their format, writer, reader and store. Knows nothing of llama, HTTP or drafters."""
