"""HTTP face of the engine: JSON in, JSON and event streams out; knows nothing below spec_server.engine."""
