"""Real training packages, one directory each, behind one interface; rematbench never imports
them."""
