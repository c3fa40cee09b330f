"""Models of other programs, read and written: begin with convert.py."""
