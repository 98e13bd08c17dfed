"""Records and findings → something to read: one room for each form."""
