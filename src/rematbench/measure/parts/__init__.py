"""The parts of a measurement, each in a process of its own."""
