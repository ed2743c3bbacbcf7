"""One execution while its handler runs here: steps, waits, other executions, and how it is parked."""
