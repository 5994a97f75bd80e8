"""Files and folders that appear whole or not at all, and the digests that prove them."""
