"""The torch code of measurements."""
