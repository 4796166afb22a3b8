"""Drafters: what proposes tokens for the target to verify. Knows spec_server.runtime and nothing above it."""
