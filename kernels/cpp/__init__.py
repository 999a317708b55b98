"""The CPU kernels in C++: sources, their build on first use, and the ops that call them."""
