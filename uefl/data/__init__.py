"""The silos of a federation: where images come from and how they are dealt to clients."""
