"""Workers on this machine as the clients' processes: packets over torch.distributed, with gloo on loopback;
nothing is pickled."""
