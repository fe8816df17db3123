"""One file for each command of `nystromformer`."""
