"""The server's side of a run: rounds, participants, checks, averages, and what the server trains itself."""
