"""`python -m eval bench`: servers side by side, in paired rounds of one run."""
