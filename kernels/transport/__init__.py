"""What weights that move between processes are asked: their checksums."""
