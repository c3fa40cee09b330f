"""What a token is: a character, a word, a part of a word, a whole number; bytes stand in `text/vocabulary.py`."""
