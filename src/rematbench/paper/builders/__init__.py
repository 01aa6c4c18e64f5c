"""A file for each kind of target that is no table: `build` makes it from its inputs."""
