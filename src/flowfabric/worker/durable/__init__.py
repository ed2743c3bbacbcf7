"""One execution while its handler runs here: steps, waits, children, and parking."""
