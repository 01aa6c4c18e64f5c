"""Jobs as the files of training packages describe them."""
