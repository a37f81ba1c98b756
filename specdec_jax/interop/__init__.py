"""Inside other frameworks' programs, and with their data."""
