"""The CPU kernels in C++: sources, their build on first use (build.py), and the ops that call them."""
