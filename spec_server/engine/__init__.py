"""The engine: slots, rounds, checkpoints, transfer. Knows no HTTP."""
