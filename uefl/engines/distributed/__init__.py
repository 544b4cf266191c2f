"""Workers on this machine: processes that answer packets over inherited sockets; nothing is pickled."""
