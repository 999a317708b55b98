"""What weights that move between files, processes and buffers are asked: checksums and copies."""
