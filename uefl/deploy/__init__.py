"""Runs with clients in other processes: the program of a silo, and the server's side that starts or joins
them."""
