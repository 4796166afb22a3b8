"""Measures a running server over HTTP, ours or any other that speaks llama-server's wire form."""
