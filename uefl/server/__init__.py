"""The server: rounds, participants, checks, averages, and training on its own images."""
