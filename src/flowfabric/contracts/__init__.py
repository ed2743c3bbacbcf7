"""Task signatures, typed values and codecs: what a function takes and returns, to and from JSON."""
