"""The builders of the flat configuration, until their callers have moved to :func:`uefl.data.build`."""
