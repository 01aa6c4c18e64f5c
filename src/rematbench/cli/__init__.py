"""The commands of the command line: one file per group, and files that the groups share."""
