"""Workers on this machine: processes that answer packets over sockets which they inherit; nothing is pickled."""
