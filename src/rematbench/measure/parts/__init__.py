"""The parts of a measurement, each in a separate process."""
