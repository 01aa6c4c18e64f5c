"""Every method on one layout."""
