"""Workers on this machine: processes that answer packets over inherited sockets, without pickle."""
