"""A file for each kind of target other than tables; `build` makes the target from its inputs."""
