"""Runs with clients in other processes.

The package has the program of a silo, and the server's side that starts or joins silos.
"""
