"""Inside other frameworks' programs."""
