"""Publishing: runs notebooks with checked parameters and builds the site."""
