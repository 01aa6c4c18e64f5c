"""Lower bounds of the seconds and the bytes of plans at many layouts."""
