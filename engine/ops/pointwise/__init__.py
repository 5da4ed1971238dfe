"""Functions of one number that several kernels apply."""
