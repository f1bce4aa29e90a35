"""Studies: scales, plans, the record store, and the queue that trains the arms."""
