"""Methods on every layout, with a proved gap."""
