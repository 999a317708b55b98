"""Models that see: pictures from files to pixels, towers from pixels to the decoder's rows."""
