"""The public address of the adapters, which lie in `mxfp4.adapters`."""
