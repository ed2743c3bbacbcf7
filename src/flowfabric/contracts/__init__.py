"""Task signatures, typed values and codecs: arguments and results to and from JSON."""
