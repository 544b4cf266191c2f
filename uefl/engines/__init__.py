"""Where the work of a round is done; an engine knows clients, requests and replies, and no algorithm."""
